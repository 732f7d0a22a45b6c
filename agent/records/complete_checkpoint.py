"""The newest checkpoint that is known to be complete, wherever its folder is by now.

A folder whose file server is away looks as if nothing had ever been saved: what a run knows of its
own checkpoints tells that from a run that never came to one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

T = TypeVar("T")

LATE_S = 30.0  # until a file server is back, or shows what was saved on another node
LOOK_S = 0.5  # between two looks


class CompleteCheckpoint(NamedTuple):
    """Its folder, and the step that it holds."""

    path: str
    step: int

    def is_away(self, step: int) -> bool:
        """Whether it is not there, and neither is anything as new.

        One that is there and damaged is not away: who looks for checkpoints names it.

        Args:
            step: of the newest that was found; -1: none.
        """
        return step < self.step and not os.path.isdir(self.path)

    @property
    def folder(self) -> str:
        """In which checkpoints are."""
        return os.path.dirname(self.path)

    def describe(self) -> str:
        """That it is not there, as a sentence for people without its end."""
        return (
            f"the newest checkpoint of this run, {self.path} (step {self.step}), is not there, and "
            "nothing begins from an older state. Is its disk or file server away?"
        )


def look_until_there(
    known: CompleteCheckpoint | None,
    look: Callable[[], T],
    step_of: Callable[[T], int],
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[T, bool]:
    """Look for the newest checkpoint, again while one that is known is away.

    Args:
        known: that must be there, if nothing newer is; ``None``: none.
        look: finds the newest.
        step_of: of what was found; -1: nothing.
        is_over: whether nobody waits for it any more.

    Returns:
        What was found, and whether the one that is known is still away.
    """
    until_s = time.monotonic() + LATE_S
    while True:
        found = look()
        if known is None or not known.is_away(step_of(found)):
            return found, False
        if time.monotonic() >= until_s or is_over():
            return found, True
        time.sleep(LOOK_S)
