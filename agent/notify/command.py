"""Runs a command for each notice, one at a time. In the courier."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

LIMIT_S = 30.0
_TOLD = ("event", "rank", "step", "run_id", "reason")


class EventCommand:
    """A command line; no shell reads it."""

    def __init__(self, words: list[str], limit_s: float = LIMIT_S) -> None:
        self._words, self._limit_s = words, limit_s
        self.pid = 0  # of the one that runs

    def __call__(self, notice: Mapping[str, Any]) -> str:
        """Run it; why it failed."""
        told = {name.upper(): _storable(notice[name]) for name in _TOLD}
        try:
            process = subprocess.Popen(
                self._words,
                env={**os.environ, **told},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            return f"{self._words[0]}: {error.strerror}"
        self.pid = process.pid
        try:
            code = process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            process.wait()
            return f"it was killed after {self._limit_s:g} s"
        finally:
            self.pid = 0
        return f"exit code {code}" if code else ""

    def end(self) -> None:
        """Kill the one that runs, with what it started."""
        with contextlib.suppress(ProcessLookupError):
            if self.pid:
                os.killpg(self.pid, signal.SIGKILL)


def _storable(value: object) -> str:
    """A text that an environment can hold: of an exception it may have any character."""
    text = "" if value is None else str(value).replace("\0", r"\0")
    return text.encode(errors="backslashreplace").decode()
