"""Trainings on two nodes whose ranks hold different parts of the state, each of them on both nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.cluster import Cluster
from support.jobs import poll
from support.node_jobs import PORT, NodeJobs, NodesJob, check_nothing_left
from support.sharded_trainings import SCRIPT, Undisturbed, undisturbed_digests
from support.warm_python import WarmPython

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
STEPS = 14


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Undisturbed:
    return undisturbed_digests(tmp_path_factory.mktemp("undisturbed"), warm_python, STEPS)


def check_same(jobs: NodeJobs, job: NodesJob, style: str, undisturbed: Undisturbed) -> str:
    """The same weights, and no rank was restarted but the lost ones; what msrun has said."""
    job.succeed()
    said = job.head.errors
    assert (jobs.folder / f"{style}.sha").read_text() == undisturbed(style), said
    assert len(job.head.seen("StartAttempt")) == 1, said
    assert "no step is lost" in said
    assert "of a step before" not in said
    check_nothing_left(*jobs.cluster.nodes)
    return said


@pytest.mark.parametrize("where", ["backward", "update"])
@pytest.mark.parametrize("style", ["hsdp", "tpdp"])
def test_a_rank_is_replaced(
    jobs: NodeJobs, undisturbed: Undisturbed, style: str, where: str
) -> None:
    job = jobs.start(SCRIPT, style, STEPS, "--die", 3, 6, where, nproc=2)
    said = check_same(jobs, job, style, undisturbed)
    assert "replacing it, ranks 0-2 keep running" in said


@pytest.mark.parametrize("style", ["hsdp", "tpdp"])
def test_a_spare_node_takes_the_place_of_a_lost_one(
    nodes: Callable[[int], Cluster], undisturbed: Undisturbed, style: str
) -> None:
    jobs = NodeJobs(nodes(3))
    words = (SCRIPT, style, STEPS, "--pause=0.2")
    job = jobs.start(*words, nproc=2)
    where = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=node0", f"--master-port={PORT}")
    spare = jobs.start_one(jobs.cluster.nodes[2], "--spare-node", *where, *words, nproc=2)
    spare.await_error("this node waits as a spare")
    job.head.await_error("protected")
    poll(lambda: any("step 5" in log for log in job.logs().values()))
    jobs.cluster.nodes[1].kill()
    job.head.await_error("node 1 (node2) has come in the place of the lost one")
    job.parts[1], spare.rank = spare, 1
    said = check_same(jobs, job, style, undisturbed)
    assert "replacing ranks 2-3, ranks 0-1 keep running" in said
