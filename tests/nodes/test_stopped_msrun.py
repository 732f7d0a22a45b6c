"""The msrun of a node is stopped: its machine answers, so no line is silent, but nobody hears it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from support.cluster import Cluster
from support.node_jobs import PORT, NodeJobs, check_nothing_left
from support.node_trainings import SCRIPT, go, logs_of, train, weights

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


@pytest.mark.parametrize("killed", [(), (3,)], ids=["alone", "as a rank elsewhere is killed"])
def test_node_0_counts_as_lost_too_and_takes_its_place_again(
    nodes: Nodes, undisturbed: list[str], killed: tuple[int, ...]
) -> None:
    """The job waited for as long as that msrun was stopped, and nobody said so."""
    jobs = NodeJobs(nodes(4))
    job = train(jobs, SOONER, "/", *WAITS, nodes=range(4), nproc=1)
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    stopped, leads = job.parts[:2]
    stopped.signal(signal.SIGSTOP)
    job.kill_rank(*killed)
    go(jobs)
    leads.await_error("node 0 (node0) answers, but its msrun has said nothing for ")
    leads.await_error("the controller's node has said nothing for 9 s: the ranks of this node save")
    leads.await_error("this node takes the part of node 0, which is lost; step 4 is saved")
    stopped.signal(signal.SIGCONT)
    stopped.await_error("more than half of the nodes are silent, and may go on without this one")
    stopped.await_error(
        ". It looks for the others, 10 min 0 s at most, and waits for a place in their job"
    )
    go(jobs, 7)
    assert [part.wait().code for part in job.parts] == [0] * 4, job.told()
    assert weights(logs_of(*job.parts)) == undisturbed
    check_nothing_left(*jobs.cluster.nodes)


@pytest.mark.parametrize("which", [0, 1])
def test_one_that_is_continued_in_time_costs_nothing(
    jobs: NodeJobs, undisturbed: list[str], which: int
) -> None:
    job = train(jobs, "--node-timeout=10", "/", *WAITS[:1])
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    stopped, other = job.parts[which], job.parts[1 - which]
    stopped.signal(signal.SIGSTOP)
    go(jobs)
    other.await_error(f"node {which} (node{which}) answers, but its msrun has said nothing for 5 s")
    stopped.signal(signal.SIGCONT)
    job.succeed()
    assert weights(job.logs().values()) == undisturbed
    assert [log.count("from step") for log in job.logs().values()] == [1] * 4
    assert not any("is silent" in part.errors for part in job.parts), job.told()
    check_nothing_left(*jobs.cluster.nodes)
