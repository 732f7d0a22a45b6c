"""The controller's decisions about graceful exits: histories and single cases."""

from signal import SIGTERM

import pytest
from support.histories.dumps import (
    PROGRESS,
    events_of,
    froze,
    running,
)
from support.histories.exits import AGREED, HELD, HISTORIES, LEAVING, TWO, stands
from support.histories.plain import gone, play, replay, rules

from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.dump import NOTHING
from agent.controller.job import Job
from agent.controller.states import RankState
from agent.spec import exit_budget


@pytest.mark.parametrize(
    ("asked", "steps"), [row[1:] for row in HISTORIES], ids=[row[0] for row in HISTORIES]
)
def test_history(asked, steps):
    play(asked, steps)


def test_a_request_says_how_long_it_may_take():
    job = Job(TWO)
    for event in events_of(running(2, 4)):
        job = decide(job, event).job
    for grace_s, held_s in ((3.0, 2.0), (45.0, 30.0), (60.0, 45.0), (600.0, 585.0)):
        *_, deadline = decide(job, ev.StopRequested(SIGTERM, grace_s=grace_s)).actions
        assert deadline.after_s == pytest.approx(held_s)


@pytest.mark.parametrize("grace_s", [0.1, 5.0, 30.0, 600.0])
def test_what_is_waited_for_leaves_room_for_the_dump(grace_s):
    held_s, freeze_s = exit_budget.hold_s(grace_s, 15), exit_budget.hurried_freeze_s(grace_s, 15)
    assert held_s > grace_s / 2
    assert held_s + 2 * freeze_s == pytest.approx(grace_s)


def test_the_split_is_kept():
    asked = rules(ranks=(0, 1), split=True)
    *_, last = AGREED, (froze(1, 6), "holding")
    play(asked, [*AGREED, last, (froze(0, 6), "dumping", f"save 6 by 1,0; {PROGRESS}", "step 6")])


def test_a_rank_that_fails_when_it_was_ordered_to_exit_has_failed():
    job = replay(TWO, [*events_of(LEAVING), gone(0, 1), gone(1, 0)])
    assert job.ranks == {0: RankState.FAILED, 1: RankState.SUCCEEDED}


def test_before_the_first_step_there_is_nothing_to_save_and_that_is_said():
    stay = [stands(0, 0), stands(1, 0), froze(0, 0), froze(1, 0)]
    job = replay(TWO, [*events_of([*running(2), HELD]), *stay])
    assert job.now.outcome == NOTHING
