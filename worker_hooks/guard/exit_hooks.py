"""Holds a process that wants to end while its state may still be needed.

A survivor whose collective fails raises within milliseconds of a peer's death, and would take its
copy of the state with it. The script need not catch anything: the exception is held at the top,
after its traceback is in the log.
"""

from __future__ import annotations

import atexit
import sys
import threading
from types import TracebackType
from typing import Protocol


class ExitHold(Protocol):
    """Who can hold the main thread."""

    def raised(self, error: str) -> bool:
        """Until nothing is to be saved any more."""

    def leave(self) -> None:
        """The same, for a process that exits by itself."""


def install_exit_hooks(guard: ExitHold) -> None:
    """Hold this process's main thread at its ends: an uncaught exception, and any exit."""
    previous = sys.excepthook

    def at_top(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        previous(kind, error, trace)  # first of all: the traceback must be in the log
        if threading.current_thread() is threading.main_thread() and not issubclass(
            kind, KeyboardInterrupt
        ):
            sys.stderr.flush()
            guard.raised(describe(error))

    sys.excepthook = at_top
    atexit.register(guard.leave)


def describe(error: BaseException) -> str:
    """An exception's last line."""
    lines = str(error).strip().splitlines()
    name = type(error).__qualname__
    return f"{name}: {lines[-1]}" if lines else name
