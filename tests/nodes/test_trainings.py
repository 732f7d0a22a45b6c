"""Trainings on two nodes that are disturbed: nothing is lost, nothing differs, nothing is left."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest
from support.cluster import Cluster
from support.jobs import poll
from support.node_jobs import (
    PORT,
    NodeJobs,
    NodeMsrun,
    NodesJob,
    check_nothing_left,
    job_of,
    programs_on,
)
from support.node_trainings import (
    RESTARTS,
    SCRIPT,
    TRIGGERED,
    first_step,
    go,
    saved,
    train,
    weights,
)

Nodes = Callable[[int], Cluster]
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]


def check_same(job: NodesJob, undisturbed: list[str], attempt: int) -> None:
    ended = job.succeed()
    logs = job.logs().values()
    assert weights(logs) == undisturbed
    told = [re.findall(r"ended at .*, attempt (\d+)", log) for log in logs]
    assert told == [told[0]] * len(undisturbed)  # TORCHELASTIC_RESTART_COUNT, on every node
    assert job.head.seen("StartAttempt")[-1]["attempt"] == attempt
    assert "Root Cause" not in "".join(each.err for each in ended)
    check_nothing_left(*(part.node for part in job.parts))


def check_taken(job: NodesJob, new: NodeMsrun, undisturbed: list[str]) -> None:
    """``new`` has the place of the lost node 1, in step 5."""
    job.parts[1], new.rank = new, 1
    job.head.await_error("training resumes at step 5")
    check_same(job, undisturbed, 0)
    assert "no step is lost" in job.head.errors


DEATHS = {"on node 1": (3,), "rank 0": (0,), "one on each": (1, 2), "all on node 0": (0, 1)}


@pytest.mark.parametrize("case", DEATHS)
def test_ranks_are_replaced(jobs: NodeJobs, undisturbed: list[str], case: str) -> None:
    job = train(jobs, "/", "--wait=5:3")
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    job.kill_rank(*DEATHS[case])
    job.head.await_error("keep running")
    go(jobs)  # a rank that waits for this cannot leave its training function
    check_same(job, undisturbed, 0)
    assert "training resumes at step 5, no step is lost" in job.head.errors
    replaced = {rank for each in job.head.seen("ReplaceRanks") for rank in each["newcomers"]}
    assert replaced == set(DEATHS[case])
    assert saved(jobs) == []


@pytest.mark.parametrize("is_silent", [False, True], ids=["killed", "without power"])
def test_another_node_takes_the_place_of_a_lost_one(
    jobs: NodeJobs, undisturbed: list[str], is_silent: bool
) -> None:
    job = train(jobs, "/", "--wait=5:1")
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    node = jobs.cluster.nodes[1]
    (node.poweroff if is_silent else node.kill)()
    job.head.await_error("another node 1: start msrun again")
    go(jobs)
    node.boot()
    where = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=node0", f"--master-port={PORT}")
    words = (*where, SCRIPT, "--wait=5:1")
    job.parts[1] = jobs.start_one(node, *words, nproc=2, log_dir=node.folder / "again")
    check_taken(job, job.parts[1], undisturbed)


def test_a_spare_node_takes_the_place_of_a_lost_one(nodes: Nodes, undisturbed: list[str]) -> None:
    jobs = NodeJobs(nodes(3))
    job = train(jobs, "/", "--wait=5:1")
    where = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=node0", f"--master-port={PORT}")
    words = ("--spare-node", *where, SCRIPT, "--wait=5:1")
    spare = jobs.start_one(jobs.cluster.nodes[2], *words, nproc=2)
    spare.await_error("this node waits as a spare")
    job.head.await_error("a spare node has come (node2)")
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    jobs.cluster.nodes[1].kill()
    job.head.await_error("node 1 (node2) has come in the place of the lost one")
    go(jobs)
    check_taken(job, spare, undisturbed)
    assert "waiting" not in job.head.errors


def test_a_spare_node_that_was_not_needed_ends_with_the_job(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    job = train(jobs, "/", "--wait=5:1")
    where = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=node0", f"--master-port={PORT}")
    spare = jobs.start_one(jobs.cluster.nodes[2], "--spare-node", *where, SCRIPT)
    spare.await_error("this node waits as a spare")
    go(jobs)
    job.succeed()
    ended = spare.wait()
    assert ended.code == 0
    assert ended.err.splitlines()[-1].startswith("msrun: the job is over: ")
    check_nothing_left(*jobs.cluster.nodes)


def test_the_msrun_that_decides_is_killed_and_the_job_is_resumed(
    jobs: NodeJobs, undisturbed: list[str]
) -> None:
    job = train(jobs, "--node-wait=0", "/", "--wait=5:1,3")
    job.await_lines("waits in step 5", 2)
    job.head.await_error("protected")
    job.head.signal(signal.SIGKILL)
    assert job.parts[1].wait().code == 1, job.told()
    poll(lambda: not any(map(programs_on, jobs.cluster.nodes)))
    (found,) = saved(jobs)
    assert (found.step, found.without_private, found.stale_private) == (4, (), ())
    go(jobs)
    again = train(jobs, "--resume", "/", "--wait=5:1,3")
    ended = again.succeed()
    assert "resuming step 4" in ended[0].err
    assert weights(again.logs().values()) == undisturbed


@pytest.mark.parametrize("case", DEATHS)
def test_all_ranks_restart(jobs: NodeJobs, undisturbed: list[str], case: str) -> None:
    job = train(jobs, RESTARTS, "--max-restarts=1", "/", "--wait=5:3")
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    job.kill_rank(*DEATHS[case])
    job.head.await_seen("StartAttempt", 2)
    go(jobs)
    check_same(job, undisturbed, 1)
    (found,) = saved(jobs)
    assert (found.step, found.stale_private, found.without_private) == (4, (), ())
    assert first_step(job) == 5


def test_ranks_are_killed_again_and_while_all_restart(
    jobs: NodeJobs, undisturbed: list[str]
) -> None:
    job = train(jobs, RESTARTS, "--max-restarts=3", "/", "--wait=3:1")
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    job.kill_rank(2)
    job.head.await_seen("StartAttempt", 2)
    job.kill_rank(3)  # while it starts
    job.head.await_seen("StartAttempt", 3)
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    job.kill_rank(0)
    job.head.await_seen("StartAttempt", 4)
    go(jobs)
    check_same(job, undisturbed, 3)
    assert [each.step for each in saved(jobs)] == [2]


def test_a_stop_is_graceful_and_gone_on_with(jobs: NodeJobs, undisturbed: list[str]) -> None:
    job = train(jobs, "/", "--wait=3:0")
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    job.parts[1].signal(signal.SIGTERM)
    job.head.await_state("holding")
    go(jobs)
    ended = job.succeed()
    assert [log.count(TRIGGERED) for log in job.logs().values()] == [1] * 4
    (found,) = saved(jobs)
    assert "graceful exit" in found.reason
    assert (found.odd, found.without_private, found.stale_private) == ((), (), ())
    assert "msrun: to resume: msrun --resume" in ended[0].err
    check_nothing_left(*jobs.cluster.nodes)
    parts = [jobs.start_one(part.node, "--resume", nproc=2) for part in job.parts]
    for rank, part in enumerate(parts):
        part.rank = rank
    again = NodesJob(parts)
    again.succeed()
    assert weights(again.logs().values()) == undisturbed
    assert first_step(again) == found.step + 1


def test_all_restart_from_a_periodic_checkpoint(jobs: NodeJobs, undisturbed: list[str]) -> None:
    options = ("--on-failure=restart", "--max-restarts=1")
    job = train(jobs, *options, "/", "--periodic=saved", "--wait=6:2")
    job.await_lines("waits in step 6")
    job.head.await_error("protected")
    poll((jobs.folder / "saved/Net-1_4/manifest.json").exists)
    job.kill_rank(1)
    job.head.await_seen("StartAttempt", 2)
    go(jobs)
    check_same(job, undisturbed, 1)
    assert first_step(job) == 5
    assert [each.step for each in saved(jobs, "saved")] == [2, 4, 6, 8]


def test_a_cable_that_is_cut_for_a_moment_disturbs_nobody(
    jobs: NodeJobs, undisturbed: list[str]
) -> None:
    job = train(jobs, "/", "--pause=0.05", "--wait=3:1")
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    jobs.cluster.nodes[1].cut()
    go(jobs)
    signal.sigtimedwait([], 8)  # the case: so long nothing is heard
    jobs.cluster.nodes[1].mend()
    check_same(job, undisturbed, 0)
    assert "silent" not in job.head.errors
    warning = "node 1 (node1) has not answered for 5 s: after 10 s it counts as lost"
    assert job.head.errors.count(warning) == 1


@pytest.mark.parametrize("at", [0, 1])
def test_msrun_of_a_node_stands_still_for_a_while(
    jobs: NodeJobs, undisturbed: list[str], at: int
) -> None:
    job = train(jobs, "/", "--pause=0.05", "--wait=3:1")
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    job.parts[at].signal(signal.SIGSTOP)
    go(jobs)
    signal.sigtimedwait([], 5)
    job.parts[at].signal(signal.SIGCONT)
    check_same(job, undisturbed, 0)


def test_what_three_nodes_have_saved_is_gone_on_with_by_two(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    where = ("--nnodes=2:3", "--master-addr=node0", f"--master-port={PORT}", "--node-wait=0")
    words = (*where, "--rdzv-conf=last_call_timeout=2", SCRIPT, "--wait=5:1")
    job = job_of(*(jobs.start_one(node, *words) for node in jobs.cluster.nodes))
    job.await_lines("waits in step 5")
    job.head.await_error("protected")
    assert job.world == 3
    jobs.cluster.nodes[2].kill()
    assert [part.wait().code for part in job.parts[:2]] == [1, 1], job.told()
    (found,) = saved(jobs)
    assert (found.step, found.world_size) == (4, 3)
    go(jobs)
    parts = [jobs.start_one(node, "--resume") for node in jobs.cluster.nodes[:2]]
    again = job_of(*parts)
    again.succeed()
    again.head.await_error("resuming step 4")
    assert again.world == 2
    check_nothing_left(*jobs.cluster.nodes)
