"""What killed ranks have left in their memory: when it is read, and when it counts for nothing."""

import pytest
from support.histories import kept
from support.histories.replacements import play

from agent.controller import actions as do
from agent.controller.decide import decide
from agent.controller.replication import kept_state


@pytest.mark.parametrize(
    ("rules_", "steps"),
    [row[1:] for row in kept.HISTORIES],
    ids=[row[0] for row in kept.HISTORIES],
)
def test_history(rules_, steps):
    play(rules_, steps)


def test_as_long_as_a_rank_lives_nothing_is_read():
    job = play(kept.TWO, [*kept.training(2), kept.FIRST])
    assert job.now.kept
    assert kept_state(job) is None


def test_an_order_to_read_says_who_holds_the_same():
    job = play(kept.THREE, kept.NOW_ALL)
    (order,) = (
        each for each in decide(job, kept.killed(2, 7)).actions if isinstance(each, do.CommitDump)
    )
    assert (order.variants, order.holders) == (((0,), (1,), (2,)), ((0,), (1,), (2,)))
