"""The msrun of a node is stopped: its machine answers, so no line is silent, but nobody hears it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from support.cluster import Cluster
from support.node_jobs import PORT, NodeJobs, check_nothing_left
from support.node_trainings import SCRIPT, go, train, weights

Nodes = Callable[[int], Cluster]
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
SOONER = "--node-timeout=3"
WAITS = ("--wait=5:1", "--wait=7:1")


@pytest.mark.parametrize("killed", [(), (0,)], ids=["alone", "as a rank elsewhere is killed"])
def test_it_counts_as_lost_and_a_spare_node_takes_its_place(
    nodes: Nodes, undisturbed: list[str], killed: tuple[int, ...]
) -> None:
    """Who waited for it waited for minutes, and the step was lost; or ranks trained on unseen."""
    jobs = NodeJobs(nodes(3))
    job = train(jobs, SOONER, "/", *WAITS)
    where = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=node0", f"--master-port={PORT}")
    words = ("--spare-node", SOONER, *where, SCRIPT, *WAITS)
    spare = jobs.start_one(jobs.cluster.nodes[2], *words, nproc=2)
    spare.await_error("this node waits as a spare")
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    stopped = job.parts[1]
    stopped.signal(signal.SIGSTOP)
    job.kill_rank(*killed)
    go(jobs)  # whose rank that is: updates wait for the msrun that says nothing
    job.head.await_error("node 1 (node1) is silent: its msrun has said nothing for 3 s")
    job.head.await_error("node 1 (node2) has come in the place of the lost one")
    stopped.signal(signal.SIGCONT)
    stopped.await_error("this node waits as a spare")
    go(jobs, 7)
    ended = [part.wait() for part in (job.head, spare, stopped)]
    assert [each.code for each in ended] == [0] * 3, job.told()
    job.parts[1], spare.rank = spare, 1
    assert weights(job.logs().values()) == undisturbed
    assert "no step is lost" in job.head.errors
    assert ended[2].err.splitlines()[-1].startswith("msrun: the job is over: ")
    check_nothing_left(*jobs.cluster.nodes)
