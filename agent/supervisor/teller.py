"""When the present state of a job is told: what readers of ``status.json`` may rely on.

A new state of the job is told at once, so nobody who saw its event reads of an older one for long.
What changes within a state is told together: a replacement changes it forty times in 0.3 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent.controller.states import JobState

REFRESH_S = 2.0  # how old the steps that are told may be
TELL_S = 0.1  # and how old the rest of it


class Teller:
    """Tells of changes, now or soon."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tell: Callable[[], bool]) -> None:
        """Tell by calling ``tell``, which returns whether what it told grows old by itself."""
        self._loop = loop
        self._tell = tell
        self._state = JobState.NEW
        self._told_at = loop.time() - TELL_S
        self._timer: asyncio.TimerHandle | None = None

    def changed(self, state: JobState) -> None:
        """Something changed; ``state``: the job's."""
        if state is not self._state or state.is_end:
            self._state = state
            self._now()
        else:
            self._by(self._told_at + TELL_S)

    def _now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._told_at = self._loop.time()
        if self._tell():
            self._by(self._told_at + REFRESH_S)

    def _by(self, when: float) -> None:
        if self._timer is None or self._timer.when() > when:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(when, self._now)
