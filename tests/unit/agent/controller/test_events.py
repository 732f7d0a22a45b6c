"""What is known of a survivor and was not decided on yet, is as true in the new attempt."""

import pytest

from agent.controller import events as ev
from agent.controller.events import renewed
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
