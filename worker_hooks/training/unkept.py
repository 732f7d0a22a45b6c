"""What changes while training and is kept nowhere, so that a new process begins without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from worker_hooks.data.unkept_values import UnkeptValues
from worker_hooks.script.kept import ScriptValues
from worker_hooks.script.unregistered import Unregistered

SHARE = 0.01  # of the time, for looks at the begins of loops


class Unkept:
    """Objects that nobody registered, and values that are not saved.

    To look at them takes longer than a commit may. So this is done at the first, second, fourth
    commit and so on, and at the first one of a loop, as scripts change much between loops.
    """

    def __init__(
        self,
        registered: Mapping[str, object],
        state_of: Callable[[str], Any],
        script: ScriptValues,
    ) -> None:
        """As :class:`Unregistered`; ``script``: what is kept of the script's values."""
        self._script = script
        self._objects = Unregistered(registered, state_of)
        self._values = UnkeptValues(script)
        self._commits, self._looked_at, self._cost_s = 0, 0.0, 0.0

    def begin(self, frames: Iterable[FrameType]) -> list[str]:
        """The first loop begins; sentences on what it trains beside the registered state."""
        return self._objects.begin(self._script.groups, frames, self._script.is_ignored)

    def committed(self, is_kept: Callable[[str], bool], *, is_first: bool) -> list[str]:
        """A step is committed; sentences on what has changed, each once.

        Args:
            is_kept: tells for the name of a variable of the loop whether its value is saved.
            is_first: of a loop.
        """
        self._commits += 1
        begin = time.monotonic()
        is_cheap = is_first and begin - self._looked_at > self._cost_s / SHARE
        if self._commits & (self._commits - 1) and not is_cheap:
            return []
        told = self._objects.changed(is_kept) + self._values.changed(is_first=self._commits == 1)
        self._looked_at = time.monotonic()
        self._cost_s = self._looked_at - begin
        return told
