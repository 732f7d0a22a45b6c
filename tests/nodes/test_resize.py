"""A job of --nnodes=MIN:MAX goes on with a node that comes, and without one that is lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from signal import SIGINT, SIGTERM

import pytest
from support.cluster import Cluster
from support.node_jobs import PORT, NodeJobs, NodeMsrun, check_nothing_left, job_of
from support.node_trainings import SCRIPT, go, saved

Nodes = Callable[[int], Cluster]
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
MEET = ("--nnodes=2:3", "--master-addr=node0", f"--master-port={PORT}")
WORDS = (*MEET, "--rdzv-conf=last_call_timeout=1", "--node-wait=4")


def start(jobs: NodeJobs, count: int, *script: object) -> list[NodeMsrun]:
    nodes = jobs.cluster.nodes[:count]
    return [jobs.start_one(node, *WORDS, SCRIPT, *script, nproc=1) for node in nodes]


def check_gone_on(jobs: NodeJobs, parts: list[NodeMsrun], world: int) -> None:
    """All ended with 0, and training went on from the step that was saved, on so many ranks."""
    ended = [part.wait() for part in parts]
    said = "".join(each.err for each in ended)
    assert [each.code for each in ended] == [0] * len(parts), said
    assert f"it goes on with {world} node{'s' if world > 1 else ''}" in said
    assert "Root Cause" not in said
    check_nothing_left(*jobs.cluster.nodes)


def check_no_step_lost(part: NodeMsrun) -> None:
    """Its rank has begun each step once, over all runs."""
    logs = [path.read_text() for path in part.folder.rglob("worker_*.log")]
    steps = sorted(int(step) for log in logs for step in re.findall(r"begins step (\d+)", log))
    assert steps == [*range(1, len(steps) + 1)]


def test_a_node_that_comes_is_taken_in(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    parts = start(jobs, 2, "--wait=3:1", "--pause=0.1", "--epochs=4")
    job_of(*parts).await_lines("waits in step 3")
    parts[0].await_error("protected")
    new = jobs.start_one(
        jobs.cluster.nodes[2], *WORDS, SCRIPT, "--wait=3:1", "--pause=0.1", "--epochs=4", nproc=1
    )
    parts[0].await_error("node2 has come: the job goes on with 3 nodes")
    go(jobs)
    check_gone_on(jobs, [*parts, new], 3)
    for part in parts:
        check_no_step_lost(part)


def test_a_lost_node_is_done_without(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    parts = start(jobs, 3, "--wait=3:1", "--pause=0.1", "--epochs=4")
    job_of(*parts).await_lines("waits in step 3")
    parts[0].await_error("protected")
    jobs.cluster.nodes[2].kill()
    go(jobs)
    parts[0].await_error("the job goes on with 2 nodes")
    check_gone_on(jobs, parts[:2], 2)


def test_a_job_of_one_node_grows_and_goes_back_to_one(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(2))
    words = ("--nnodes=1:2", *WORDS[1:], SCRIPT, "--wait=3:0", "--pause=0.1", "--epochs=6")
    first = jobs.start_one(jobs.cluster.nodes[0], *words, nproc=1)
    job_of(first).await_lines("waits in step 3")
    jobs.start_one(jobs.cluster.nodes[1], *words, nproc=1)
    first.await_error("node1 has come: the job goes on with 2 nodes")
    go(jobs)
    first.await_error("it goes on with 2 nodes")
    first.await_error("likewise a node, once another takes its place")
    jobs.cluster.nodes[1].kill()
    check_gone_on(jobs, [first], 1)


# --- a node is asked to end: --on-leave=shrink ----------------------------------------------------

LEAVES = (*WORDS, "--on-leave=shrink")
LONG = ("--wait=3:1", "--pause=0.1", "--epochs=4")


def started(jobs: NodeJobs, count: int = 3, options: Sequence[str] = LEAVES) -> list[NodeMsrun]:
    """Their ranks train; rank 1 waits in step 3."""
    nodes = jobs.cluster.nodes[:count]
    parts = [jobs.start_one(node, *options, SCRIPT, *LONG, nproc=1) for node in nodes]
    job_of(*parts).await_lines("waits in step 3")
    parts[0].await_error("protected")
    return parts


def check_left(part: NodeMsrun, nodes: int) -> None:
    """The node has left with its step saved, and nothing of the job is there."""
    ended = part.wait()
    assert ended.code == 0, ended.err
    many = f"{nodes} node{'s' if nodes > 1 else ''}"
    assert f"this node has left: the job goes on with {many}, from " in ended.err
    assert "Root Cause" not in ended.err
    check_nothing_left(part.node)


def test_a_node_that_is_asked_to_end_leaves(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    parts = started(jobs)
    parts[2].signal(SIGTERM)
    parts[0].await_error("node 2 (node2) leaves: the job goes on with 2 nodes")
    go(jobs)
    check_left(parts[2], 2)
    check_gone_on(jobs, parts[:2], 2)


def test_node_0_leaves_as_any_other(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    parts = started(jobs)
    parts[0].signal(SIGTERM)
    parts[0].await_error("node 0 (node0) leaves: the job goes on with 2 nodes")
    go(jobs)
    check_left(parts[0], 2)
    parts[1].await_error("this node takes the part of node 0, which has left")
    check_gone_on(jobs, parts[1:], 2)
    for part in parts[1:]:
        check_no_step_lost(part)


def test_two_nodes_leave_at_once_and_one_goes_on_alone(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    parts = started(jobs, options=("--nnodes=1:3", *LEAVES[1:]))
    for part in parts[:2]:
        part.signal(SIGTERM)
    parts[0].await_error("leaves as well: the job goes on with 1 node")
    go(jobs)
    for part in parts[:2]:
        check_left(part, 1)
    check_gone_on(jobs, parts[2:], 1)


def test_node_0_is_asked_as_the_next_run_begins(nodes: Nodes) -> None:
    """Whether the other node counts on it already is a matter of milliseconds."""
    jobs = NodeJobs(nodes(3))
    parts = started(jobs, options=("--nnodes=1:3", *LEAVES[1:]))
    parts[2].signal(SIGTERM)
    parts[0].await_error("node 2 (node2) leaves: the job goes on with 2 nodes")
    go(jobs)
    check_left(parts[2], 2)
    parts[0].await_error("resuming step 3")
    parts[0].signal(SIGTERM)
    left, ended = parts[0].wait(), parts[1].wait()
    assert (left.code, ended.code) == (0, 0), left.err + ended.err
    assert "this node has left" in left.err
    assert "resuming step 3" in ended.err
    assert "ended at step" in job_of(parts[1]).told()
    check_nothing_left(*jobs.cluster.nodes)


def test_a_node_that_waits_takes_the_place_of_one_that_leaves(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(4))
    parts = started(jobs)
    new = jobs.start_one(jobs.cluster.nodes[3], *LEAVES, SCRIPT, *LONG, nproc=1)
    parts[0].await_error("another node has come (node3)")
    parts[2].signal(SIGTERM)
    parts[0].await_error("node 2 (node2) leaves: the job goes on with 3 nodes")
    go(jobs)
    check_left(parts[2], 3)
    check_gone_on(jobs, [*parts[:2], new], 3)
    assert parts[0].errors.count("resuming step") == 1


def check_stopped(jobs: NodeJobs, parts: list[NodeMsrun], why: str) -> None:
    """All have ended gracefully with their step saved, as without the option."""
    ended = [part.wait() for part in parts]
    said = "".join(each.err for each in ended)
    assert [each.code for each in ended] == [0] * len(parts), said
    assert why in said
    assert "every rank exited with 0" in said
    assert "to resume: msrun --resume" in said
    assert "has left" not in said
    assert [each.step for each in saved(jobs)] == [3]
    check_nothing_left(*jobs.cluster.nodes)


def test_where_too_few_would_be_left_the_whole_job_stops(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(2))
    parts = started(jobs, 2)
    parts[1].signal(SIGTERM)
    why = "the job does not go on without node 1 (node1), but stops: 1 node would be left"
    parts[0].await_error(why)
    go(jobs)
    check_stopped(jobs, parts, why)


def test_a_stop_that_is_asked_for_while_a_node_leaves_is_for_all(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    parts = started(jobs)
    parts[2].signal(SIGTERM)
    parts[0].await_error("node 2 (node2) leaves: the job goes on with 2 nodes")
    parts[1].signal(SIGINT)
    parts[0].await_error("msrun received SIGINT")
    go(jobs)
    ended = [part.wait() for part in parts]
    assert [each.code for each in ended] == [130] * 3, ended[0].err
    assert "has left" not in "".join(each.err for each in ended)
    assert [each.step for each in saved(jobs)] == [3]
    check_nothing_left(*jobs.cluster.nodes)


def test_a_second_signal_is_not_waited_for_the_end_of_the_step(nodes: Nodes) -> None:
    """Rank 1 comes to the end of no step until the node has left."""
    jobs = NodeJobs(nodes(3))
    parts = started(jobs)
    parts[2].signal(SIGTERM)
    parts[0].await_error("node 2 (node2) leaves: the job goes on with 2 nodes")
    parts[2].signal(SIGTERM)
    parts[0].await_error("node 2 (node2) leaves at once: what is complete is saved at once")
    check_left(parts[2], 2)
    assert [each.step for each in saved(jobs)] == [2]
    go(jobs)
    check_gone_on(jobs, parts[:2], 2)


def test_msrun_stop_means_the_whole_job_wherever_it_is_typed(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    parts = started(jobs)
    go(jobs)
    told = parts[2].command("stop")
    assert (told.code, told.err) == (0, "")
    ended = [part.wait() for part in parts]
    assert [each.code for each in ended] == [0] * 3, ended[0].err
    assert "graceful exit: msrun stop, every rank exited with 0" in ended[0].err
    assert "has left" not in "".join(each.err for each in ended)
    check_nothing_left(*jobs.cluster.nodes)
