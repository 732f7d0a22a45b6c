"""What the incidents of a run would have cost where each of them restarts all ranks. Pure.

torchrun stops all ranks, starts them again, and the script trains again what follows its newest
checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

INTERVALS = (10, 100, 1000)  # steps from one checkpoint to the next


class WholeRestarts(NamedTuple):
    """With a checkpoint every ``interval`` steps."""

    interval: int
    steps: int  # trained again
    seconds: float | None  # starting and training them; None: not known


def whole_restarts(
    steps: Sequence[int], start_s: float | None, step_s: float | None
) -> list[WholeRestarts]:
    """One for each interval.

    Args:
        steps: that the incidents interrupted, counted from 1.
        start_s: from the start of the ranks until all train.
    """
    found = []
    for interval in INTERVALS:
        again = sum((step - 1) % interval for step in steps)
        seconds = None
        if start_s is not None and step_s is not None:
            seconds = len(steps) * start_s + again * step_s
        found.append(WholeRestarts(interval, again, seconds))
    return found
