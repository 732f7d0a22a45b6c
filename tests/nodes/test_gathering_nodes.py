"""Whoever asks while the nodes of a job still gather is told who is missing, and can stop them."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from support.cluster import Cluster
from support.jobs import poll
from support.node_jobs import NodeJobs, NodesJob, check_nothing_left, static
from support.node_places import PLACE

Nodes = Callable[[int], Cluster]


def gathering(nodes: Nodes) -> NodesJob:
    """Two of three nodes are here."""
    jobs = NodeJobs(cluster := nodes(3))
    parts = [jobs.start_one(cluster.nodes[rank], *static(rank, 3, 1), PLACE) for rank in range(2)]
    parts[0].await_error("2 of 3 nodes are here (node0, node1); node rank 2 is missing")
    return NodesJob(parts)


@pytest.mark.parametrize("at", [0, 1])
def test_status_says_who_is_missing_and_stop_ends_all(nodes: Nodes, at: int) -> None:
    job = gathering(nodes)
    part = job.parts[at]
    told = poll(lambda: (said := part.command("status")).out.count("is missing") and said)
    assert told.code == 0
    assert "starting" in told.out
    assert "2 of 3 nodes are here (node0, node1); node rank 2 is missing" in told.out
    stopped = part.command("stop")
    assert stopped.code == 0, stopped
    ended = job.wait()
    assert [each.code for each in ended] == [128 + signal.SIGTERM] * 2, job.told()
    why = f"stopped by SIGTERM on node{at} before all nodes were here"
    for each in ended:
        said = [line for line in each.err.splitlines() if " waiting " not in line]
        assert [line for line in said if why in line] == said[-1:], each.err
    after = part.command("status")
    assert why in after.out, after
    check_nothing_left(*(each.node for each in job.parts))


def test_a_signal_to_the_first_node_ends_all(nodes: Nodes) -> None:
    job = gathering(nodes)
    job.head.signal(signal.SIGTERM)
    assert [each.code for each in job.wait()] == [128 + signal.SIGTERM] * 2, job.told()


def test_a_signal_to_another_node_ends_its_msrun_and_the_job_waits_on(nodes: Nodes) -> None:
    """Whoever has mistyped a node's line starts it again."""
    job = gathering(nodes)
    job.parts[1].signal(signal.SIGINT)
    assert job.parts[1].wait().code == 128 + signal.SIGINT
    job.head.await_error("1 of 3 nodes is here (node0); node ranks 1, 2 are missing")
    assert "the other nodes go on waiting" in job.parts[1].errors
    job.head.signal(signal.SIGINT)
    assert job.head.wait().code == 128 + signal.SIGINT
