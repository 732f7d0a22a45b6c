"""What a job may still replace and restart is the same whoever decides, however often that is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from support.cluster import Cluster
from support.hand_jobs import SCHEDULER, start, start_all
from support.jobs import poll
from support.node_jobs import PORT, NodeJobs, NodeMsrun, check_nothing_left, job_of
from support.node_trainings import PATIENT, SCRIPT, go, saved

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
Nodes = Callable[[int], Cluster]
WAITS = (SCRIPT, PATIENT, "--wait=3:0,1", "--wait=6:0,1", "--wait=9:0,1")
LEADS = "this node takes the part of node 0, which is lost: the ranks of the other nodes live on"
SPENT = "all 2 replacements within 3600 s are spent"


def spare(jobs: NodeJobs, node: int) -> NodeMsrun:
    meeting = ("--spare-node", "--nnodes=2", "--master-addr=node0", f"--master-port={PORT}")
    part = jobs.start_one(
        jobs.cluster.nodes[node],
        *meeting,
        "--max-replacements=2",
        *WAITS,
        log_dir=jobs.cluster.nodes[node].folder / "spare",
    )
    part.await_error("this node waits as a spare")
    return part


def await_step(step: int, *parts: NodeMsrun) -> None:
    """The rank on each of these nodes waits there."""
    line = f"waits in step {step}"
    logs = [part.folder for part in parts]
    poll(
        lambda: all(
            any(line in path.read_text() for path in folder.glob("worker_*.log")) for folder in logs
        )
    )


def test_two_replacements_are_two_though_node_0_is_lost_again_and_again(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(4))
    job = jobs.start("--max-replacements=2", *WAITS)
    first, second = job.parts
    third, fourth = spare(jobs, 2), spare(jobs, 3)
    job.await_lines("waits in step 3", 2)
    first.await_error("protected")
    job.kill_rank(1)
    first.await_error("; replacing it")
    go(jobs)
    first.await_error("rank 1 is back")
    await_step(6, first, second)
    jobs.cluster.nodes[0].kill()
    second.await_error(LEADS)
    second.await_error("; replacing it")
    go(jobs, 6)
    second.await_error("rank 0 is back")
    told = poll(lambda: (found := second.status())["state"] == "running" and found)
    assert (told["replaced"], told["max_replacements"]) == (2, 2)
    (there,) = [each for each in (third, fourth) if "is node 0 of 2" in each.errors]
    waits = fourth if there is third else third
    await_step(9, second, there)
    jobs.cluster.nodes[1].kill()
    there.await_error(LEADS)
    for part in (there, waits):
        assert part.wait().code == 1, part.errors
    assert f"not replaced: {SPENT}" in there.errors
    assert "2 ranks replaced (2 before that)" in there.errors
    assert [each.step for each in saved(jobs)] == [8]
    check_nothing_left(*jobs.cluster.nodes)


def test_a_scheduler_that_is_started_again_knows_what_the_last_one_had_used_up(
    jobs: NodeJobs,
) -> None:
    words = ("--max-replacements=1", SCRIPT, PATIENT, "--wait=3:3", "--wait=5:3")
    job = start_all(jobs, *words)
    job.await_lines("waits in step 3")
    job.head.await_error("protected")
    job.kill_rank(1)
    job.head.await_error("; replacing it")
    go(jobs)
    job.head.await_error("rank 1 is back")
    job.await_lines("waits in step 5")
    job.head.signal(signal.SIGKILL)
    job.parts[1].await_error("the ranks train on without it")
    again = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(jobs.folder / "recovery")}
    job.parts[0] = start(jobs, SCHEDULER, *words, again="_again", **again)
    job.head.await_error("the workers train, without a scheduler: this one controls them")
    poll(lambda: min(job.head.pids().values(), default=-1) > 0)  # as the workers have told again
    assert job.head.status()["replaced"] == 1
    job.kill_rank(2)
    assert job.head.wait().code == 1, job.told()
    assert "not replaced: all 1 replacements within 3600 s are spent" in job.head.errors
    assert [each.step for each in saved(jobs)] == [4]
    check_nothing_left(*jobs.cluster.nodes)


def test_a_job_that_grows_and_one_whose_nodes_meet_again_count_on(nodes: Nodes) -> None:
    jobs = NodeJobs(nodes(3))
    meet = ("--nnodes=2:3", "--master-addr=node0", f"--master-port={PORT}")
    words = (*meet, "--rdzv-conf=last_call_timeout=1", "--max-replacements=1", SCRIPT, PATIENT)
    words = (*words, "--wait=3:1", "--pause=0.1", "--epochs=60")
    first, second = (jobs.start_one(node, *words) for node in jobs.cluster.nodes[:2])
    job = job_of(first, second)
    job.await_lines("waits in step 3")
    first.await_error("protected")
    job.kill_rank(1)
    first.await_error("; replacing it")
    go(jobs)
    first.await_error("rank 1 is back")
    jobs.start_one(jobs.cluster.nodes[2], *words)
    first.await_error("it goes on with 3 nodes")
    poll(lambda: first.errors.count("msrun: protected") == 2)
    assert (first.status()["replaced"], len(first.status()["workers"])) == (1, 3)
    jobs.cluster.nodes[0].kill()
    second.await_error("its node 0 was lost")
    job = job_of(second)  # with the first rank
    second.await_error("msrun: protected")
    assert (second.status()["replaced"], len(second.status()["workers"])) == (1, 2)
    job.kill_rank(0)
    assert second.wait().code == 1, second.errors
    assert "not replaced: all 1 replacements within 3600 s are spent" in second.errors
    check_nothing_left(*jobs.cluster.nodes)
