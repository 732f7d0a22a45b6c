"""What an attempt goes on from, and when another one would only meet the same."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.histories.dumps import (
    COMMITTING,
    SAVED,
    TWO,
    done,
    events_of,
    froze,
    reg,
    running,
)
from support.histories.plain import (
    gone,
    late,
    launch,
    no_start,
    play,
    replay,
    replay_from,
    rules,
    up,
)
from support.histories.restarts import (
    ASKED,
    FOUR_AGAIN,
    HISTORIES,
    LOST_NODES,
    STARTED_4,
    TWO_AGAIN,
    found,
    lost,
)

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job, first_job
from agent.controller.states import JobState
from agent.spec.device_plan import DevicePlan
from agent.spec.job_spec import AdoptedJob
from agent.spec.spent_budget import SpentBudget

TERM_ALL = ("TERM 0,1,3; deadline stopping 30", "rank 2 is lost")


@pytest.mark.parametrize(
    ("asked", "steps"), [row[1:] for row in HISTORIES], ids=[row[0] for row in HISTORIES]
)
def test_history(asked, steps):
    play(asked, steps)


@pytest.mark.parametrize(
    ("asked", "steps"), [row[1:] for row in LOST_NODES], ids=[row[0] for row in LOST_NODES]
)
def test_a_lost_node(asked, steps):
    play(asked, steps)


def test_restarts_that_a_lost_node_leaves_unused_are_named():
    job = play(FOUR_AGAIN, [*STARTED_4, (lost(2), "stopping", *TERM_ALL)])
    job = replay_from(job, [lost(3), gone(0, -15), gone(1, -15)])
    why = "the job needs all its nodes, and none has taken the place of the lost one"
    assert job.gave_up == f"{why} (3 of 3 restarts left unused)"
    assert job.lost_node.startswith("node 1 (b) is gone")


def crash(attempt, step, committed=0):
    """One of two ranks dies, the other one is torn, so nothing is saved; `committed`: as it was heard."""
    starts = [each for rank in (0, 1) for each in (up(rank, attempt), reg(rank, step, attempt))]
    died = ev.WorkerExited(1, attempt, -11, committed)
    return [*starts, died, froze(0, committed, "torn", attempt + 1), gone(0, -15, attempt)]


def test_three_attempts_without_a_new_commit_end_the_job_whatever_the_budget():
    job = replay(rules(max_restarts=9), [launch(), *crash(0, 0, 412)])
    job = replay_from(job, [*crash(1, 400, 411), *crash(2, 400, 412)])
    assert (job.state, job.stalled) == (JobState.STARTING, 2)
    for event in crash(3, 400, 400):
        decision = decide(job, event)
        job = decision.job
    assert (
        "rank 1 was killed by SIGSEGV: 3 attempts in a row reached no commit after step 412"
        in decision.actions[-1].reason
    )
    assert decision.actions[-1].exit_code == 1


def test_the_first_step_is_one_to_name():
    job = replay(rules(max_restarts=9), [launch(), *crash(0, 0, 1), *crash(1, 1, 1)])
    for event in [*crash(2, 1, 1), *crash(3, 1, 1)]:
        decision = decide(job, event)
        job = decision.job
    assert "3 attempts in a row reached no commit after step 1" in decision.actions[-1].reason


def test_a_new_commit_begins_the_count_anew():
    job = replay(
        rules(max_restarts=9), [launch(), *crash(0, 0, 3), *crash(1, 0, 3), *crash(2, 0, 2)]
    )
    assert job.stalled == 2
    assert replay_from(job, crash(3, 0, 4)).stalled == 0


def test_an_attempt_that_nobody_registers_in_reaches_nothing():
    job = replay(rules(max_restarts=9), [launch(), *crash(0, 0, 3)])
    job = replay_from(job, [up(0, 1), up(1, 1), gone(0, 1, 1), gone(1, 1, 1)])
    assert (job.attempt, job.stalled) == (2, 1)


def test_attempts_of_a_script_without_hooks_are_not_counted():
    job = replay(rules(max_restarts=9), [launch()])
    for attempt in range(9):
        ends = [gone(0, 1, attempt), gone(1, 1, attempt)]
        job = replay_from(job, [up(0, attempt), up(1, attempt), *ends])
    assert (job.attempt, job.stalled, job.state) == (9, 0, JobState.STARTING)


@pytest.mark.parametrize(
    ("asked", "steps"), [row[1:] for row in ASKED], ids=[row[0] for row in ASKED]
)
def test_what_cannot_be_gone_on_from_ends_the_job(asked, steps):
    play(asked, steps)


def test_what_a_script_found_by_itself_is_known():
    starts = [each for rank in (0, 1) for each in (up(rank), reg(rank, 7))]
    job = replay(TWO_AGAIN, [launch(), found(), *starts, gone(1, -9)])
    assert (job.resume, job.saved_step, job.best_step) == ("/old", 7, 7)
    decision = decide(job, froze(0, 7))
    assert decision.actions[0] == do.AbandonDump(1, "step 7 is saved in /old")
    decision = decide(decision.job, gone(0, -15))
    assert decision.actions[1].resume == "/old"
    assert decision.job.stalled == 1  # what others reached is no progress


def test_what_is_known_or_about_to_be_is_newer_than_what_was_found():
    job = replay(TWO, [*events_of(running(2, 7)), gone(1, -9)])
    assert job.state is JobState.FREEZING
    assert decide(job, found()).job == job
    for job in (replay(TWO, [launch()], resume="/new", saved_step=9), replay(TWO, [launch()])):
        assert decide(job, found(attempt=1)).job == job
    job = replay(TWO, [launch()], resume="/new", saved_step=9)
    assert decide(job, found()).job == job


def test_restarts_that_are_left_unused_are_explained():
    job = replay(rules(max_restarts=5), [launch(), *crash(0, 0, 412), *crash(1, 400, 411)])
    assert job.gave_up == ""
    job = replay_from(job, [*crash(2, 400, 412), *crash(3, 400, 400)])
    why = "3 attempts in a row reached no commit after step 412"
    assert job.gave_up == f"{why} (2 of 5 restarts left unused)"
    job = replay(rules(max_restarts=4, restarts_explicit=False), [launch(), *crash(0, 0)])
    assert job.gave_up.startswith("nothing was committed yet, so a restart would meet the same")
    assert job.gave_up.endswith("(4 of 4 restarts left unused)")


@pytest.mark.parametrize(("budget", "stalls"), [(0, 3), (2, 3), (0, 1)])
def test_a_budget_that_is_spent_needs_no_explanation(budget, stalls):
    job = replay(rules(max_restarts=budget, stalls=stalls), [launch()])
    for attempt in range(budget + 1):
        job = replay_from(job, crash(attempt, 0))
    assert (job.state, job.gave_up) == (JobState.FAILED, "")


RESUMED = {"resume": "/old", "saved_step": 7}


def test_a_resumed_job_starts_from_its_checkpoint():
    decision = decide(Job(TWO, **RESUMED), launch())
    assert decision.actions[0].resume == "/old"


def test_what_is_saved_already_is_not_written_again():
    job = replay(TWO, [*events_of(running(2, 7)), gone(1, -9)], **RESUMED)
    decision = decide(job, froze(0, 7))
    assert decision.actions[0] == do.AbandonDump(1, "step 7 is saved in /old")
    assert decision.job.state is JobState.STOPPING


def test_what_is_lost_and_what_remains():
    job = replay(TWO, [*events_of(running(2, 7)), gone(1, -9)], **RESUMED)
    lost = decide(job, froze(0, 9, "torn")).actions[0].reason
    assert lost.startswith("step 9 is not saved: no rank holds it whole: ")
    assert lost.endswith("; step 7 is saved in /old")
    lost = decide(job, froze(0, 7, "torn")).actions[0].reason
    assert lost.startswith("no newer step is saved: ")


def test_a_resumed_job_that_goes_no_further_is_not_a_failed_first_attempt():
    asked = rules(max_restarts=9, restarts_explicit=False)
    job = replay(asked, [launch(), *crash(0, 7, 7)], **RESUMED)
    assert (job.attempt, job.stalled) == (1, 1)


def test_a_commit_that_is_heard_in_the_next_attempt_counts_for_the_one_after():
    asked = rules(ranks=(0, 1, 2), max_restarts=3)
    job = replay(asked, [*events_of(COMMITTING), late("committing"), gone(0, -15), gone(2, -15)])
    assert (job.attempt, job.resume) == (1, None)
    job = replay_from(job, [done("/late")])
    assert (job.state, job.resume, job.saved_step, job.now.outcome) == (
        JobState.STARTING,
        "/late",
        5,
        "",
    )
    decision = decide(replay_from(job, [up(0, 1), no_start(1, 1), no_start(2, 1)]), gone(0, -15, 1))
    assert decision.actions[1].resume == "/late"


def test_ids_of_dumps_are_never_used_again():
    asked = rules(ranks=(0, 1, 2), max_restarts=3)
    job = replay(asked, [*events_of(SAVED), gone(0, -15), gone(2, -15)])
    job = replay_from(job, [each for rank in range(3) for each in (up(rank, 1), reg(rank, 5, 1))])
    assert decide(job, gone(0, -9, 1)).actions[0].dump_id == 2


def test_a_job_that_was_told_where_to_resume_knows_the_step():
    dump = SimpleNamespace(resume=Path("/old"), resume_step=7)
    spec = SimpleNamespace(dump=dump, policy=TWO, devices=DevicePlan(), adopted=None)
    spec.spent = SpentBudget()
    job = first_job(spec)
    assert (job.resume, job.saved_step, job.policy) == ("/old", 7, TWO)


def test_a_job_whose_ranks_train_knows_their_attempt_and_what_that_resumed_from():
    dump = SimpleNamespace(resume=Path("/old"), resume_step=7)
    spec = SimpleNamespace(dump=dump, policy=TWO, devices=DevicePlan())
    spec.adopted, spec.spent = AdoptedJob("job", 3), SpentBudget(1, 8, (4.0, 5.0))
    job = first_job(spec)
    assert (job.restarts, job.replaced_in_all, job.replaced) == (1, 8, 2)
    assert (job.attempt, job.resume, job.saved_step) == (3, "/old", 7)
    spec.adopted = AdoptedJob("job", 3, Path("/newer"), 50)
    job = first_job(spec)
    assert (job.attempt, job.resume, job.saved_step) == (3, "/newer", 50)
    begun = decide(job, launch())
    assert begun.actions[0] == do.StartAttempt(3, "the job begins", "/newer")


def test_late_news_of_an_older_step_are_no_way_back():
    job = replay(TWO, events_of(running(2, 7))).with_step(0, 5)
    assert job.now.registered == {0: 7, 1: 7}
