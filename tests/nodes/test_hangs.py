"""Ranks that make no progress, on two nodes: they are found wherever they run, and replaced."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from support.cluster import Cluster
from support.node_jobs import NodeJobs, check_nothing_left
from support.node_trainings import go, train, weights

Nodes = Callable[[int], Cluster]
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]


@pytest.mark.parametrize("rank", [3, 0])
def test_a_stopped_rank_is_replaced(jobs: NodeJobs, undisturbed: list[str], rank: int) -> None:
    job = train(jobs, "/", "--pause=0.05", "--wait=5:2")
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    job.kill_rank(rank, signum=signal.SIGSTOP)
    go(jobs)
    job.head.await_error("stopped by a signal")
    job.succeed()
    assert weights(job.logs().values()) == undisturbed
    (replaced,) = job.head.seen("ReplaceRanks")
    assert replaced["newcomers"] == [rank]
    assert "no step is lost" in job.head.errors
    check_nothing_left(*jobs.cluster.nodes)


def test_a_rank_that_waits_for_ever_is_found_by_its_stack(
    jobs: NodeJobs, undisturbed: list[str]
) -> None:
    job = train(jobs, "--hang-timeout=4", "/", "--wait=5:3")
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    job.head.await_error("rank 3 made no progress")
    go(jobs)
    job.succeed()
    assert weights(job.logs().values()) == undisturbed
    assert {rank for each in job.head.seen("ReplaceRanks") for rank in each["newcomers"]} == {3}
    judged = job.head.seen("HangJudged")[-1]
    assert any("train_on_nodes.py" in line for line in judged["stacks"]["3"]), judged
    assert "limit is 4 s" in job.head.errors


def test_nobody_is_blamed_for_a_cable_that_is_cut(jobs: NodeJobs, undisturbed: list[str]) -> None:
    job = train(jobs, "--hang-timeout=3", "/", "--pause=0.5")
    job.await_lines("begins step 3")
    jobs.cluster.nodes[1].cut()
    signal.sigtimedwait([], 6)  # the case: twice as long as a rank may take
    assert job.head.process.poll() is None
    jobs.cluster.nodes[1].mend()
    job.succeed()
    assert weights(job.logs().values()) == undisturbed
    assert job.head.seen("ReplaceRanks") == []
