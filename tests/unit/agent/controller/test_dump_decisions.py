"""The controller's decisions about dumps: histories and single cases."""

import pytest
from support.histories.dumps import (
    COMMITTING,
    DUMPING,
    FREEZING,
    HISTORIES,
    SAVED,
    THREE,
    TWO,
    WRITTEN,
    cut,
    done,
    events_of,
    froze,
    full,
    holds,
    moved,
    reg,
    running,
    threw,
    unable,
    undone,
    wrote,
)
from support.histories.plain import (
    gone,
    launch,
    play,
    replay,
    replay_from,
)

from agent.controller.decide import decide
from agent.controller.states import RankState


@pytest.mark.parametrize(
    ("asked", "steps"), [row[1:] for row in HISTORIES], ids=[row[0] for row in HISTORIES]
)
def test_history(asked, steps):
    play(asked, steps)


def test_a_rank_that_raised_failed_and_was_not_stopped():
    job = replay(
        THREE,
        [
            *events_of(running(3)),
            threw(0),
            *map(froze, range(3)),
            wrote(0),
            holds(1),
            holds(2),
            done(),
        ],
    )
    job = replay_from(job, [gone(0, 1), gone(1, -15), gone(2, 0)])
    assert job.ranks == {0: RankState.FAILED, 1: RankState.STOPPED, 2: RankState.SUCCEEDED}


@pytest.mark.parametrize(
    ("steps", "event"),
    [
        (FREEZING, froze(0, dump=2)),
        (FREEZING, froze(1)),  # it is dead and was not asked
        (FREEZING, wrote(0)),
        (FREEZING, moved(0)),
        (DUMPING, froze(0, 6)),  # said before
        (DUMPING, wrote(2)),  # not asked to
        (DUMPING, wrote(0, number=1)),
        (DUMPING, wrote(0, dump=2)),
        (DUMPING, unable(0, number=3)),
        (DUMPING, holds(0)),
        (DUMPING, done()),
        (DUMPING, undone()),
        (WRITTEN, wrote(0)),
        (WRITTEN, full(0)),
        (COMMITTING, holds(2, "b")),
        (SAVED, froze(0)),
        (SAVED, undone()),
        (running(2), done()),
        (running(2), cut(0, attempt=1)),
        (running(2), reg(0, 3, attempt=1)),
        (running(2), threw(0, attempt=1)),
    ],
)
def test_what_was_not_asked_or_is_old_changes_nothing(steps, event):
    job = replay(THREE, events_of(steps))
    decision = decide(job, event)
    assert (decision.job, decision.actions) == (job, ())


def test_a_rank_that_does_not_exist_raises():
    with pytest.raises(KeyError):
        decide(replay(TWO, [launch()]), reg(2))
