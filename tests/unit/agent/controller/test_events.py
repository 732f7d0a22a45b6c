"""News and orders: what of them is as true in a new attempt, and how the journal has them."""

import pytest

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.events import fields, renewed
from worker_hooks.contract import protocol


@pytest.mark.parametrize(
    ("event", "attempt"),
    [
        (ev.WorkerExited(1, 3, -9, 5), 4),
        (ev.RankUnreachable(1, 3), 4),
        (ev.WorkerExited(2, 3, -9), 3),  # the lost one's own end
        (ev.WorkerExited(1, 2, -9), 2),
        (protocol.Raised(1, 3, "RuntimeError: a peer is gone"), 3),
    ],
)
def test_deaths_are_not_missed(event, attempt):
    assert renewed(event, 4, (0, 1)).attempt == attempt


def test_what_has_no_attempt_stays():
    assert renewed(ev.ReplacementAged(), 4, (0, 1)) == ev.ReplacementAged()


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (protocol.Rejoining(1, 3), {"rank": 1, "attempt": 3}),
        (
            ev.RankUnreachable(1, 3),
            {"rank": 1, "attempt": 3, "why": "let go of its state"},
        ),
    ],
)
def test_the_journal_has_an_event_by_its_fields(event, said):
    assert fields(event) == said


@pytest.mark.parametrize(
    ("action", "name", "said"),
    [
        (do.Tell((0, 1), protocol.GoOn(3), "all joined"), "GoOn", {"ranks": (0, 1), "attempt": 3, "reason": "all joined"}),
        (do.ForgetMemory("it is over"), "ForgetMemory", {"reason": "it is over"}),
    ],
)  # fmt: skip
def test_the_journal_has_a_message_by_its_own_name(action, name, said):
    assert do.name_and_fields(action) == (name, said)
