"""What changes while training and is kept nowhere, so that a new process begins without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from worker_hooks.data.unkept_values import UnkeptValues
from worker_hooks.script.kept import ScriptValues
from worker_hooks.script.unregistered import Unregistered


class Unkept:
    """Objects that nobody registered, and values that are not saved."""

    def __init__(
        self,
        registered: Mapping[str, object],
        state_of: Callable[[str], Any],
        script: ScriptValues,
    ) -> None:
        """As :class:`Unregistered`; ``script``: what is kept of the script's values."""
        self._script = script
        self._objects = Unregistered(registered, state_of)
        self._values: UnkeptValues | None = None

    def begin(self, frames: Iterable[FrameType]) -> list[str]:
        """The first loop begins; sentences on what it trains beside the registered state."""
        self._values = UnkeptValues(self._script)
        return self._objects.begin(self._script.groups, frames, self._script.is_ignored)

    def committed(self, is_kept: Callable[[str], bool], *, is_first: bool) -> list[str]:
        """A step is committed; sentences on what has changed, each once.

        Args:
            is_kept: tells for the name of a variable of the loop whether its value is saved.
            is_first: of a loop.
        """
        told = self._objects.committed(is_kept)
        return told if self._values is None else told + self._values.committed(is_first=is_first)
