"""Parts of a large state, which different nodes hold, travel from these to the nodes that need them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.cluster import Cluster
from support.jobs import poll
from support.node_jobs import NodeJobs, NodesJob
from support.sharded_trainings import SCRIPT, Undisturbed, undisturbed_digests
from support.traffic import received, sent
from support.warm_python import WarmPython

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
MIB = 1 << 20
TABLE = 8  # MiB of each part
STEPS = 40


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Undisturbed:
    return undisturbed_digests(tmp_path_factory.mktemp("undisturbed"), warm_python, STEPS)


def begin(jobs: NodeJobs, *words: str) -> NodesJob:
    """Ranks 0 and 2 hold one part, ranks 1 and 3 the other, each on a node of its own."""
    where = {"nodes": range(4), "nproc": 1}
    job = jobs.start(SCRIPT, "tpdp", STEPS, f"--table={TABLE}", "--pause=0.1", *words, **where)
    job.head.await_error("protected")
    poll(lambda: any("step 4" in log for log in job.logs().values()))
    return job


def check_same(jobs: NodeJobs, job: NodesJob, undisturbed: Undisturbed) -> None:
    job.succeed()
    assert (jobs.folder / "tpdp.sha").read_text() == undisturbed("tpdp"), job.told()
    assert len(job.head.seen("StartAttempt")) == 1, job.told()
    assert "no step is lost" in job.head.errors


@pytest.mark.parametrize("dead", [3, 2])
def test_a_new_rank_gets_its_part_from_the_node_that_holds_it(
    nodes: Callable[[int], Cluster], undisturbed: Undisturbed, dead: int
) -> None:
    jobs = NodeJobs(cluster := nodes(4))
    job = begin(jobs)
    came, left = ([each(cluster, node) for node in range(4)] for each in (received, sent))
    job.kill_rank(dead)
    job.head.await_error("training resumes at step")
    came = [received(cluster, node) - before for node, before in enumerate(came)]
    left = [sent(cluster, node) - before for node, before in enumerate(left)]
    check_same(jobs, job, undisturbed)
    part = TABLE * MIB
    assert part < came[dead] < 1.5 * part, came  # its own, and not the other one
    donor = dead - 2  # of its own part; rank 1 has none of which node 0 is the donor
    assert left[donor] > part, left
