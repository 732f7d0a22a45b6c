"""A run's ``events.jsonl``, read as it grows."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from msrun.top.history import EventHistory
from worker_hooks.contract.layout import EVENTS

CHUNK_BYTES = 1 << 20


class Events:
    """The history from all lines so far."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._partial = b""
        self._history = EventHistory()

    def read(self, folder: Path) -> EventHistory:
        """The history up to now, or up to the last time that the file could be read."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = os.open(folder / EVENTS, os.O_RDONLY | os.O_CLOEXEC)
            while chunk := os.read(self._file, CHUNK_BYTES):
                *lines, self._partial = (self._partial + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
        return self._history

    def _take(self, line: bytes) -> None:
        """Take a line; one that is damaged or of another version is skipped."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            self._history = self._history.after(json.loads(line))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
