"""The gate between the main thread, which trains, and the listener thread, which may stop it.

The replicated state is *whole* from a commit until the next optimizer update begins, and *torn*
from there to the next commit. A closed gate lets no update begin; a held one keeps the main thread
at its next commit. A Python signal handler could not do this: a rank that is blocked in a
collective runs those up to 30 s late.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from types import FrameType

STILL_S = 0.2  # a main thread that stands at one instruction for so long is blocked, not busy
LOOK_S = 0.02  # between two looks at it


class Stand(Enum):
    """Where the main thread was found when the gate was closed."""

    WHOLE = "whole"  # no update since the commit
    UPDATED = "updated"  # the update is done, the main thread stands still before its commit
    TORN = "torn"


class Gate:
    """Who may pass. All times are seconds."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._holding = False
        self._held = False
        self._raised = False
        self._updates = 0  # under way
        self._torn = False
        self._is_settled = False  # called updated: what is torn is complete

    # --- the main thread ------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Before an optimizer touches anything; waits while the gate is closed."""
        with self._changed:
            # the second optimizer of a step goes through, if that was not called complete
            while self._closed and (self._is_settled or not self._torn):
                self._changed.wait()
            self._torn = True
            self._updates += 1

    def end_update(self) -> None:
        """After it."""
        with self._changed:
            self._updates -= 1
            self._changed.notify_all()

    def commit(self, note: Callable[[], None]) -> None:
        """Make the step a commit; ``note`` writes it down while the listener must not look."""
        with self._changed:
            note()
            self._torn = False
            self._updates = 0  # one that failed has told no end
            self._changed.notify_all()

    def pause(self) -> None:
        """At a commit: stay here as long as the main thread is to be held."""
        if self._holding or self._closed:
            with self._changed:
                self._held = True
                self._changed.notify_all()
                while self._holding or self._closed:
                    self._changed.wait()
                self._held = False

    def note_raised(self) -> None:
        """The main thread came to its top with an exception: it goes nowhere any more."""
        with self._changed:
            self._raised = True
            self._changed.notify_all()

    # --- the listener ---------------------------------------------------------------------------

    @property
    def is_torn(self) -> bool:
        """Whether an update began since the last commit."""
        return self._torn

    @property
    def is_held(self) -> bool:
        """Whether the main thread stands at a commit, or at its top with an exception."""
        return self._held or self._raised

    def hold(self) -> None:
        """Keep the main thread at its next commit; updates go on until then."""
        with self._changed:
            self._holding = True

    def open(self) -> None:
        """Let everything go on."""
        with self._changed:
            self._closed = self._holding = self._is_settled = False
            self._changed.notify_all()

    def close(
        self,
        grace_s: float,
        is_complete: Callable[[], bool],
        is_touched: Callable[[], bool] = lambda: False,
    ) -> Stand:
        """Let no update begin; let one that is under way come to its commit, if it can.

        Args:
            grace_s: how long to wait for that.
            is_complete: whether all that a step usually changes has changed; asked when the main
                thread stands still after an update, in a collective that a dead rank never joins.
            is_touched: whether the script has changed state by itself since the commit.
        """
        deadline = time.monotonic() + grace_s
        frame, since = _place(), time.monotonic()
        with self._changed:
            self._closed = True
            while self._torn or is_touched():
                now = time.monotonic()
                if (place := _place()) != frame:
                    frame, since = place, now
                is_still = self._raised or now - since > STILL_S
                if is_still and self._updates == 0 and is_complete():
                    self._is_settled = True
                    return Stand.UPDATED
                if self._raised or now > deadline:
                    return Stand.TORN
                self._changed.wait(LOOK_S)
            return Stand.WHOLE


def _place() -> tuple[int, int]:
    """The instruction the main thread is at."""
    ident = threading.main_thread().ident
    frame: FrameType | None = None if ident is None else sys._current_frames().get(ident)  # noqa: SLF001
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)
