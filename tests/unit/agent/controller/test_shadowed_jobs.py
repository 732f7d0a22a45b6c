"""Ranks without hooks go on from shadows of their processes, if there are any of one step."""

import signal

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.controller.protection import Level, protection
from agent.controller.states import JobState
from agent.spec.job_spec import Policy, ReplaceSpec

KILLED = -signal.SIGKILL


def running(job):
    for rank in job.policy.ranks:
        job = decide(job, ev.WorkerStarted(rank, job.attempt, 100 + rank)).job
    assert job.state is JobState.RUNNING
    return job


def begun(**replace):
    policy = Policy((0, 1), max_restarts=0, replace=ReplaceSpec(**replace))
    return running(decide(Job(policy), ev.LaunchRequested()).job)


def lose_all(job):
    """Rank 1 dies, the other one is killed; the last decision."""
    first = decide(job, ev.WorkerExited(1, job.attempt, KILLED))
    assert do.SignalRanks((0,), signal.SIGKILL, "rank 1 was killed by SIGKILL") in first.actions
    return decide(first.job, ev.WorkerExited(0, job.attempt, KILLED))


def starts(decision):
    return [each for each in decision.actions if isinstance(each, do.StartAttempt)]


def test_all_go_on_from_shadows_without_a_restart_of_the_budget():
    job = decide(begun(), ev.ShadowsChanged(0, 7)).job
    assert protection(job).level is Level.PROTECTED
    after = lose_all(job)
    (start,) = starts(after)
    assert (start.attempt, start.shadow) == (1, 7)
    assert "shadows of optimizer step 7" in after.say
    assert (after.job.restarts, after.job.replaced) == (0, 1)
    assert do.RemindReplaced(3600.0) in after.actions


def test_the_present_interval_is_told():
    job = decide(begun(), ev.ShadowsChanged(0, 7)).job
    after = decide(job, ev.ShadowsChanged(0, 47, every=40))
    assert not after.say
    assert protection(after.job).why.endswith("a shadow about every 40 steps")
    woken = lose_all(after.job).job
    assert protection(decide(woken, ev.ShadowsChanged(1, 48)).job).why.endswith("every 40 steps")


def test_that_there_are_no_newer_ones_is_said_once_and_they_still_hold():
    job = decide(begun(), ev.ShadowsChanged(0, 7)).job
    old = decide(job, ev.ShadowsChanged(0, 7, "rank 0: a thread"))
    assert old.say.startswith("partly protected: no newer shadows are made: rank 0: a thread; ")
    assert "behind optimizer step 7" in old.say
    assert starts(lose_all(old.job))[0].shadow == 7
    newer = decide(old.job, ev.ShadowsChanged(0, 9))
    assert protection(newer.job).level is Level.PROTECTED
    again = decide(newer.job, ev.ShadowsChanged(0, 9, "rank 1: a thread"))
    assert not again.say
    assert protection(again.job).level is Level.PARTLY


def test_what_is_repeated_is_said_anew_if_older_copies_are_complete_behind_the_refusal():
    job = decide(begun(), ev.ShadowsChanged(0, 1)).job
    old = decide(job, ev.ShadowsChanged(0, 1, "rank 0: a thread"))
    assert "behind optimizer step 1, " in old.say
    newer = decide(old.job, ev.ShadowsChanged(0, 6, "rank 0: a thread"))
    assert newer.say.startswith("partly protected: no newer shadows are made: rank 0: a thread; ")
    assert "behind optimizer step 6, " in newer.say
    assert not decide(newer.job, ev.ShadowsChanged(0, 6, "rank 0: a thread")).say


def test_without_shadows_ranks_are_asked_to_stop_and_the_job_ends():
    job = decide(begun(), ev.ShadowsChanged(0, 7)).job
    job = decide(job, ev.ShadowsChanged(0, -1, "rank 0: a thread")).job
    assert protection(job).level is Level.NOT_PROTECTED
    assert "a thread" in protection(job).why
    first = decide(job, ev.WorkerExited(1, 0, KILLED))
    assert do.SignalRanks((0,), signal.SIGTERM, "rank 1 was killed by SIGKILL") in first.actions
    last = decide(first.job, ev.WorkerExited(0, 0, KILLED))
    assert not starts(last)
    assert last.job.state is JobState.FAILED


def test_the_same_step_is_not_gone_on_from_for_ever():
    job = decide(begun(), ev.ShadowsChanged(0, 7)).job
    for _ in range(3):
        after = lose_all(job)
        assert starts(after)
        job = running(after.job)
    last = lose_all(job)
    assert not starts(last)
    assert last.job.state is JobState.FAILED


def test_a_newer_step_is_progress_and_the_budget_of_replacements_bounds_it():
    job = decide(begun(max_replacements=5), ev.ShadowsChanged(0, 1)).job
    for count in range(5):
        after = lose_all(job)
        assert starts(after)[0].shadow == 1 + count
        job = running(after.job)
        job = decide(job, ev.ShadowsChanged(job.attempt, 2 + count)).job
    assert not starts(lose_all(job))


def test_a_stop_is_not_followed_by_shadows():
    job = decide(begun(), ev.ShadowsChanged(0, 7)).job
    job = decide(job, ev.StopRequested(signal.SIGTERM)).job
    job = decide(job, ev.WorkerExited(1, 0, -signal.SIGTERM)).job
    last = decide(job, ev.WorkerExited(0, 0, -signal.SIGTERM))
    assert not starts(last)
    assert last.job.state is JobState.STOPPED
