"""MindSpore's dynamic cluster: a scheduler and each worker are started one by one, by hand."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

import pytest
from support.hand_jobs import SCHEDULER, start, start_all
from support.jobs import poll
from support.node_jobs import NodeJobs, NodesJob, check_nothing_left
from support.node_trainings import PATIENT, SCRIPT, check_weights, go, weights

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
WAITS = (SCRIPT, PATIENT, "--wait=5:3")


def begun(job: NodesJob) -> None:
    job.await_lines("waits in step 5")
    job.head.await_error("protected")


def test_processes_are_started_one_by_one(jobs: NodeJobs, undisturbed: Sequence[str]) -> None:
    job = start_all(jobs, SCRIPT)
    ended = job.succeed()
    assert weights(job.logs().values()) == undisturbed
    assert sorted(job.logs()) == [f"worker_{rank}.log" for rank in range(4)]
    assert "this is worker_2, with rank 2 of 4; the job is controlled" in ended[3].err
    check_nothing_left(*jobs.cluster.nodes)


def test_a_worker_knows_its_place_on_its_machine(jobs: NodeJobs) -> None:
    script = jobs.folder / "place.py"
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    script.write_text(
        f"import os\nprint('place', *(os.environ[name] for name in {names}), flush=True)\n"
    )
    job = start_all(jobs, script)
    job.succeed()
    found = sorted(re.findall(r"place (.*)", "".join(job.logs().values())))
    assert found == ["0 0 2 0 4", "1 0 2 1 4", "2 1 2 2 4", "3 1 2 3 4"]


def test_a_worker_that_was_killed_is_started_again(
    jobs: NodeJobs, undisturbed: Sequence[str]
) -> None:
    job = start_all(jobs, *WAITS)
    begun(job)
    job.parts[2].signal(signal.SIGKILL)
    job.head.await_error("waiting 10 min 0 s at most for another worker_1: start msrun again")
    new = start(jobs, "worker_1", *WAITS, again="_again")
    job.head.await_error("keep running")
    go(jobs)
    job.parts[2] = new
    job.succeed()
    check_weights(weights(job.logs().values()), undisturbed, job.head.errors)
    assert "training resumes at step 5, no step is lost" in job.head.errors
    check_nothing_left(*jobs.cluster.nodes)


def test_a_rank_alone_is_killed(jobs: NodeJobs, undisturbed: Sequence[str]) -> None:
    """No rank is on the scheduler's node: the state comes from another one."""
    job = start_all(jobs, *WAITS)
    begun(job)
    job.kill_rank(0, 1)
    job.head.await_error("keep running")
    go(jobs)
    job.succeed()
    assert weights(job.logs().values()) == undisturbed
    assert "training resumes at step 5, no step is lost" in job.head.errors
    check_nothing_left(*jobs.cluster.nodes)


def test_two_workers_of_one_name_are_refused(jobs: NodeJobs) -> None:
    sched = start(jobs, SCHEDULER, SCRIPT, workers=2)
    one = start(jobs, "worker_0", SCRIPT, workers=2)
    sched.await_error("1 of 2 workers are here (worker_0)")
    other = start(jobs, "worker_0", SCRIPT, again="_too", workers=2)
    assert other.wait().code == 2
    assert "both have a worker that is named 'worker_0'" in other.errors
    last = start(jobs, "worker_1", SCRIPT, workers=2)
    assert [part.wait().code for part in (sched, one, last)] == [0, 0, 0]


# --- the scheduler is killed ----------------------------------------------------------------------

ALONE = "the ranks train on without it"
PROTECTED = "protected: a rank that dies is replaced"


def lose_scheduler(job: NodesJob) -> None:
    job.head.signal(signal.SIGKILL)
    for worker in job.parts[1:]:
        worker.await_error(ALONE)


def start_scheduler_again(jobs: NodeJobs, job: NodesJob, *words: object, times: int = 1) -> None:
    job.parts[0] = start(jobs, SCHEDULER, *words, again=times)
    job.head.await_error("the workers train, without a scheduler")
    for part in job.parts[1:]:
        poll(lambda part=part: part.errors.count("the scheduler is there again") == times)


def test_training_goes_on_without_the_scheduler(jobs: NodeJobs, undisturbed: Sequence[str]) -> None:
    job = start_all(jobs, *WAITS)
    begun(job)
    lose_scheduler(job)
    go(jobs)
    assert [part.wait().code for part in job.parts[1:]] == [0] * 4, job.told()
    assert weights(job.logs().values()) == undisturbed
    assert not (jobs.folder / "checkpoints").exists()
    check_nothing_left(*jobs.cluster.nodes)


def test_a_scheduler_that_is_started_again_controls_the_same_ranks(
    jobs: NodeJobs, undisturbed: Sequence[str]
) -> None:
    """They are in step 5 all the time: one dies. After the second loss, another in step 8."""
    words = (*WAITS, "--wait=8:3")
    job = start_all(jobs, *words)
    begun(job)
    lose_scheduler(job)
    start_scheduler_again(jobs, job, *words)
    job.head.await_error(PROTECTED)
    job.kill_rank(3)  # which waits, and so does the one in its place
    job.head.await_error("rank 3 is back")
    job.await_lines("waits in step 5")
    lose_scheduler(job)
    start_scheduler_again(jobs, job, *words, times=2)
    go(jobs)
    job.head.await_error(PROTECTED)  # all have shown once more what they hold
    job.kill_rank(1)
    job.head.await_error("keep running")
    go(jobs, step=8)
    job.succeed()
    assert weights(job.logs().values()) == undisturbed
    assert "no step is lost" in job.head.errors
    assert not (jobs.folder / "checkpoints").exists()
    check_nothing_left(*jobs.cluster.nodes)


def test_a_rank_dies_while_the_scheduler_is_away(
    jobs: NodeJobs, undisturbed: Sequence[str]
) -> None:
    job = start_all(jobs, *WAITS, "--pause=0.05")
    begun(job)
    lose_scheduler(job)
    job.kill_rank(1)
    go(jobs)
    assert [part.wait().code for part in job.parts[1:]] == [0] * 4, job.told()
    assert "which is lost; step 4 is saved" in job.parts[1].errors
    assert weights(job.logs().values()) == undisturbed
    check_nothing_left(*jobs.cluster.nodes)
