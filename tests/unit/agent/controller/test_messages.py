"""What people hear of a decision, and what is prepared without their hearing of it."""

from dataclasses import replace
from signal import SIGINT, SIGTERM

import pytest
from support.histories import replacements
from support.histories.dumps import done, events_of, froze, reg, running, threw
from support.histories.exits import AGREED, COMMITTING, HOLDING, LEAVING, now
from support.histories.plain import STARTED, STARTED_2, ask, gone, late, rules, up, wish
from support.histories.replacements import JOINING, MEMORY, RAISED, REPLACING, THREE

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.controller.messages import ELAPSED, sentence
from agent.controller.states import JobState

TWO = rules(max_restarts=3)
TRAINING = running(2, 4)


def told(steps, event, rules_=TWO):
    job = Job(rules_)
    for each in events_of(steps):
        job = decide(job, each).job
    return decide(job, event).say


@pytest.mark.parametrize(
    ("steps", "event", "words"),
    [
        (TRAINING, ask(SIGTERM), "graceful exit: msrun received SIGTERM; all ranks finish one step, which is then saved (at most 20 s); one more signal saves at once"),
        (TRAINING, wish(), "graceful exit: e.json asks for it; all ranks finish one step, which is then saved (at most 9 min 45 s); one more signal saves at once"),
        (HOLDING, wish(1), ""),
        (HOLDING, ask(SIGINT), "no graceful exit, msrun received SIGINT again: what is complete is saved at once; one more signal ends the job without it"),
        (HOLDING, gone(1, -9), "no graceful exit, rank 1 was killed by SIGKILL: what is complete is saved at once; 2 more signals end the job without it"),
        (HOLDING, threw(0), "no graceful exit, rank 0 raised ValueError: bad: what is complete is saved at once; 2 more signals end the job without it"),
        (AGREED, late("holding"), "no graceful exit, ranks 0, 1 did not come to the end of step 6 within 20 s: what is complete is saved at once; 2 more signals end the job without it"),
        (AGREED, now(), "no graceful exit, msrun stop --now: the job ends at once"),
        (COMMITTING, ask(SIGTERM), "the state is saved before the stop; one more signal ends the job without it"),
        (LEAVING, ask(SIGTERM), "the ranks are exiting; one more signal ends them"),
        ([*TRAINING, (gone(1, -9), "")], ask(SIGTERM), "the state is saved before the stop; one more signal ends the job without it"),
        ([*TRAINING, (gone(1, -9), "")], froze(0, 4), ""),
        (STARTED_2, ask(SIGTERM), ""),
        (TRAINING, now(), ""),
    ],
)  # fmt: skip
def test_what_is_said(steps, event, words):
    assert told(steps, event) == words


STALE = [
    (replace(event, stale=(1,)) if isinstance(event, ev.DumpCommitted) else event, *told)
    for event, *told in replacements.ALMOST
]


@pytest.mark.parametrize(
    ("steps", "event", "words"),
    [
        (replacements.COMMITTING, done(MEMORY), "rank 1 was killed by SIGKILL in step 6; replacing it, ranks 0,2 keep running"),
        (RAISED, gone(1, 1), "rank 1 raised ValueError: bad in step 6; replacing it, ranks 0,2 keep running"),
        (REPLACING, up(1, 1), ""),
        (replacements.ALMOST, reg(2, 5, 1), f"rank 1 is back{ELAPSED}; training resumes at step 6, no step is lost"),
        (STALE, reg(2, 5, 1), f"rank 1 is back{ELAPSED}; training resumes at step 6, but the result will be another than without the failure: the random numbers, buffers and data position of rank 1 are of a step before"),
        (JOINING, gone(1, 1, 1), "rank 1 exited with code 1 in step 6; replacing it, ranks 0,2 keep running"),
        (JOINING, gone(1, -9, 1, error="its device failed"), "rank 1 ended itself: its device failed in step 6; replacing it, ranks 0,2 keep running"),
        (JOINING, reg(1, 4, 1), "not replaced, rank 1 came back at step 4 instead of 5: the state is saved before a restart"),
        (JOINING, ask(SIGTERM), "the state is saved before the stop; one more signal ends the job without it"),
        (JOINING, now(), ""),
    ],
)  # fmt: skip
def test_what_is_said_of_a_replacement(steps, event, words):
    assert told(steps, event, THREE) == words


@pytest.mark.parametrize(
    ("was", "is_now", "words"),
    [
        (JobState.RUNNING, JobState.COMMITTING, "b; no rank is replaced any more, all resume from the step before"),
        (JobState.COMMITTING, JobState.COMMITTING, "b; no rank is replaced any more"),
        (JobState.RUNNING, JobState.RUNNING, "b; no rank is replaced any more"),
    ],
)  # fmt: skip
def test_only_what_goes_back_is_said_to_go_back(was, is_now, words):
    before = Job(TWO)._replace(state=was)
    assert sentence(before, before._replace(state=is_now, diverged="b"), ()) == words


def test_a_restart_says_why():
    once = rules(ranks=(0,), max_restarts=1)
    assert told([*STARTED], gone(0, 3), once) == "restart 1 of 1: rank 0 exited with code 3"


def warmed(steps, policy):
    """After which events the forkserver is ordered to import more."""
    job, found = Job(policy), []
    for event in events_of(steps):
        job, actions = (done := decide(job, event)).job, done.actions
        found += [event for each in actions if isinstance(each, do.WarmUp)]
    return found


AGAIN = [(gone(1, -9), ""), (gone(0, -15), ""), (up(0, 1), ""), (up(1, 1), "")]


@pytest.mark.parametrize(
    ("steps", "changes", "expected"),
    [
        (STARTED_2, {}, []),
        (STARTED_2, {"max_restarts": 1}, [up(1)]),
        ([*STARTED_2, *AGAIN], {"max_restarts": 1}, [up(1)]),
        ([*STARTED_2, *AGAIN], {"max_restarts": 2}, [up(1), up(1, 1)]),
        (TRAINING, {}, []),
        (TRAINING, {"is_on": True}, [reg(0, 4)]),
        (TRAINING, {"is_on": True, "max_restarts": 1}, [up(1)]),
        ([*STARTED_2, (replacements.fixed(0, "it cannot"), "")], {"is_on": True}, []),
    ],
)
def test_others_are_prepared_once_if_they_may_be_started(steps, changes, expected):
    assert warmed(steps, rules(**changes)) == expected
