"""Decisions when no rank can be replaced: the state goes to disk."""

from signal import SIGTERM

import pytest
from support.histories.dumps import cut, froze, running
from support.histories.fallbacks import HISTORIES
from support.histories.plain import ask, gone
from support.histories.replacements import (
    DIED,
    THREE,
    asked,
    fixed,
    play,
)

from agent.controller.decide import decide
from agent.controller.states import JobState


@pytest.mark.parametrize(
    ("rules_", "steps"), [row[1:] for row in HISTORIES], ids=[row[0] for row in HISTORIES]
)
def test_history(rules_, steps):
    play(rules_, steps)


WHY_NOT = [
    ("replacing is off", asked(is_on=False), []),
    ("workers are started cold", asked(why_off="workers are started cold"), []),
    ("ranks 0, 2: it trains outside run()", THREE, [fixed(0, "it trains outside run()"), fixed(2, "it trains outside run()")]),
    ("rank 0 exited already", THREE, [gone(0, 0)]),
    ("rank 2 let go of its state", THREE, [cut(2)]),
    ("all 0 replacements within 3600 s are spent", asked(max_replacements=0), []),
]  # fmt: skip


@pytest.mark.parametrize(("why", "rules_", "before"), WHY_NOT, ids=[row[0] for row in WHY_NOT])
def test_why_nobody_is_replaced(why, rules_, before):
    job = play(rules_, running(3))
    for event in (*before, gone(1, -9), froze(0), froze(2)):
        job = decide(job, event).job
    assert (job.state, job.dump.place) == (JobState.DUMPING, 0)
    assert job.now.not_replaced == why


def test_before_the_first_commit_nobody_is_replaced():
    job = play(THREE, DIED)
    for event in (froze(0, 0), froze(2, 0)):
        decision = decide(job, event)
        job = decision.job
    assert job.state is JobState.STOPPING
    assert "no step was committed yet" in job.now.outcome
    assert job.now.not_replaced == ""


def test_a_rank_without_a_state_can_have_no_newcomer():
    job = play(THREE, running(3)[:-1])
    for event in (gone(2, -9), froze(0), froze(1)):
        job = decide(job, event).job
    assert job.now.not_replaced == "rank 2 registered no state"


def test_a_stop_needs_no_excuse():
    job = play(THREE, DIED)
    for event in (ask(SIGTERM), froze(0), froze(2)):
        job = decide(job, event).job
    assert (job.dump.place, job.now.not_replaced) == (0, "")
