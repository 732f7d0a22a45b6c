"""Copies of the state in memory: who is asked for them, and which one is saved."""

from dataclasses import replace

import pytest
from support.histories import copies, groups, same
from support.histories.dumps import running
from support.histories.plain import rules
from support.histories.replacements import play
from support.simulator import mutants
from support.simulator.mutants import believing

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.attempts import Decision
from agent.controller.decide import decide
from agent.controller.drain import write_copy
from agent.controller.job import Copies
from agent.controller.replication import groups_to_copy
from agent.controller.states import JobState
from agent.spec.job_spec import CopyMode
from worker_hooks.contract import protocol
from worker_hooks.contract.fingerprint import LATE


@pytest.mark.parametrize(
    ("rules_", "steps"),
    [row[1:] for row in copies.HISTORIES],
    ids=[row[0] for row in copies.HISTORIES],
)
def test_history(rules_, steps):
    play(rules_, steps)


ALL = ((0, 1, 2),)
LATE_VALUES = [
    *same.EQUAL[:-3],
    *(
        (same.says(rank, 1, {"model.w": "x", f"{LATE}`best`": f"{rank}"}), "running")
        for rank in range(3)
    ),
]
UNREADABLE = same.says(2, 2, {}, problem="model.w is a DTensor"), "running"
UNCOUNTED = same.says(0, 0, {}, problem="no step is counted"), "running"
NEVER = copies.copied(-1, why_not="no memory is left"), "running"
NO_VOTE = protocol.VoteOpened(1, 0, 4, why_not="there is no board"), "running"
FOUR = groups.MEMORY_TOO._replace(dump=copies.ONE.dump)
AGAIN = copies.asked(3, is_on=True)


@pytest.mark.parametrize(
    ("rules_", "steps", "expected"),
    [
        (copies.ONE, running(1), ((0,),)),
        (copies.ONE, running(1)[:2], ()),
        (copies.THREE, running(3), ()),
        (copies.THREE, same.EQUAL[:-1], ()),
        (copies.THREE, same.EQUAL, ALL),
        (copies.THREE, same.OWN, ((0,), (1,), (2,))),
        (FOUR, groups.TRAINING, ((0, 2), (1, 3))),
        (same.THREE, same.EQUAL, ()),
        (same.THREE, same.OWN, ((0,), (1,), (2,))),
        (same.THREE, LATE_VALUES, ALL),
        (groups.MEMORY_TOO, groups.TRAINING, ()),
        (groups.MEMORY_TOO, [*groups.TRAINING, NO_VOTE], ((0, 2), (1, 3))),
        (rules(ranks=(0,)), running(1), ((0,),)),
        (copies.asked(1, copies=CopyMode.OFF), running(1), ()),
        (copies.asked(3, copies=CopyMode.OFF), same.OWN, ()),
        (copies.asked(3, after_failure=False), same.EQUAL, ()),
        (copies.THREE, [*same.EQUAL, copies.GROWS], ()),
        (copies.THREE, [*same.EQUAL, UNREADABLE], ()),
        (copies.THREE, [*running(3)[:-3], UNCOUNTED], ()),
        (copies.THREE, [*same.EQUAL, NEVER], ()),
        (AGAIN, copies.ROUND, ()),
        (AGAIN, copies.CONFIRMED, ALL),
    ],
    ids=[
        "alone",
        "alone, and nothing is registered",
        "nobody compares",
        "not all have reported",
        "all have",
        "each has its own part",
        "replica groups",
        "each holds it for the others",
        "each has its own part, by itself",
        "values that only their rank knows",
        "replica groups that vote on updates",
        "replica groups that do not",
        "alone, by itself",
        "alone, but not wanted",
        "each has its own part, but not wanted",
        "not to be saved",
        "the state grew",
        "cannot be compared",
        "not counted",
        "cannot be copied",
        "a replacement is on trial",
        "it is confirmed",
    ],
)
def test_who_is_asked_for_copies(rules_, steps, expected):
    assert groups_to_copy(play(rules_, steps)) == expected


def test_a_copy_is_of_the_parts_that_its_order_names():
    job = play(FOUR, copies.PARTS)
    for event in (groups.DIED[0], ev.WorkerExited(3, 0, -9)):
        job = decide(job, event).job
    late = decide(job, ev.DeadlinePassed(JobState.FREEZING, 0))
    order = next(each for each in late.actions if isinstance(each, do.CommitDump))
    assert (order.variants, order.holders) == (((0,), (3,)), ((0, 2), (1, 3)))


def with_copies(job, known):
    return job._replace(since_restart=job.since_restart._replace(copies=known))


def never_saving_one(job, event):
    decision = decide(with_copies(job, Copies()), event)
    return decision if decision.actions else decide(job, event)


def keeping_those_of_before_the_restart(job, event):
    decision = decide(job, event)
    if any(isinstance(each, do.StartAttempt) for each in decision.actions):
        return decision._replace(job=with_copies(decision.job, job.since_restart.copies))
    return decision


def saving_what_is_older(job, event):
    decision, copy = decide(job, event), job.since_restart.copies.newest
    is_saved = decision.job.saved_step > job.saved_step
    if job.state is JobState.COMMITTING and is_saved and copy is not None:
        turn = write_copy(decision.job._replace(state=job.state), copy)
        return Decision(turn.job, turn.actions)
    return decision


def trying_for_ever(job, event):
    if isinstance(event, ev.CommitFailed) and job.dump is not None and job.dump.is_copy:
        turn = write_copy(job, job.memory)
        return Decision(turn.job, turn.actions)
    return decide(job, event)


def taking_the_last_that_was_heard_of(job, event):
    if isinstance(event, ev.StateCopied) and not event.why_not:
        job = with_copies(job, job.since_restart.copies._replace(newest=None))
    return decide(job, event)


def saving_one_once_in_a_job(job, event):
    decision = decide(job, event)
    orders = [each for each in decision.actions if isinstance(each, do.CommitDump)]
    if orders and orders[0].is_copy and job.restarts and job.saved_step > 0:
        return decide(with_copies(job, Copies()), event)
    return decision


def forgetting_whose_parts_they_are(job, event):
    decision = decide(job, event)
    told = (
        replace(each, holders=()) if isinstance(each, do.CommitDump) and each.is_copy else each
        for each in decision.actions
    )
    return decision._replace(actions=tuple(told))


def believing_in_what_died_with_its_node(job, event):
    if isinstance(event, ev.WorkerExited):
        event = replace(event, lost="")
    return decide(job, event)


def asking_nobody_else(job, event):
    """The copy is saved although a rank may hold a newer step."""
    copy = job.since_restart.copies.newest
    if isinstance(event, ev.WorkerExited) and job.state is JobState.RUNNING and job.reachable():
        after = decide(job, event)
        if after.job.state is JobState.FREEZING and copy is not None:
            turn = write_copy(after.job, copy)
            return Decision(turn.job._replace(state=JobState.COMMITTING), turn.actions)
    return decide(job, event)


BROKEN = [
    (never_saving_one, "is not saved"),
    (keeping_those_of_before_the_restart, "but the newest copy is"),
    (saving_what_is_older, "but the newest copy is"),
    (trying_for_ever, " after CommitDump"),
    (taking_the_last_that_was_heard_of, "but the newest copy is"),
    (saving_one_once_in_a_job, "is not saved"),
    (forgetting_whose_parts_they_are, "but its holders are"),
    (believing_in_what_died_with_its_node, "but the newest copy is"),
    (asking_nobody_else, "can be asked"),
    (believing(ev.StateCopied, step=1), "is not saved|but the newest copy is"),
    (believing(ev.StateCopied, attempt=0), "is not saved|but the newest copy is"),
]


@mutants.cases(BROKEN)
def test_a_broken_controller_is_noticed(mutant, promise):
    mutants.assert_noticed(mutant, promise)
