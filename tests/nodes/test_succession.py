"""Node 0 is lost: another node takes its part, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from support.cluster import Cluster
from support.jobs import poll
from support.node_jobs import PORT, NodeJobs, check_nothing_left
from support.node_trainings import SCRIPT, go, saved, train, weights

pytestmark = [pytest.mark.torch, pytest.mark.slow]
Nodes = Callable[[int], Cluster]
AS_SPARE = ("--spare-node", "--nnodes=2", "--master-addr=node0", f"--master-port={PORT}")


def test_a_spare_node_takes_the_place_of_the_first(
    nodes: Nodes, undisturbed: Sequence[str]
) -> None:
    jobs = NodeJobs(nodes(3))
    words = (SCRIPT, "--wait=3:1")
    job = jobs.start(*words, nproc=2)
    spare = jobs.start_one(jobs.cluster.nodes[2], *AS_SPARE, "--nproc-per-node=2", *words, nproc=2)
    spare.await_error("this node waits as a spare")
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    go(jobs)
    jobs.cluster.nodes[0].kill()
    assert job.parts[1].wait().code == 0, job.told()
    assert spare.wait().code == 0, spare.errors
    print(job.parts[1].errors, spare.errors)
    check_nothing_left(jobs.cluster)
