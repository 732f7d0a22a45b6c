"""Holds a process that is about to end while its state may still be needed.

A survivor whose collective fails raises within milliseconds of a peer's death, and would take its
copy of the state with it. The script need not catch anything: an uncaught exception is held after
its traceback is in the log.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class ExitHold(Protocol):
    """What can hold the main thread."""

    def hold_exception(self, error: str, *, is_futile: bool = False) -> bool:
        """Wait until nothing is to be saved any more."""

    def hold_exit(self) -> None:
        """The same, for a process that exits by itself."""


def install_exit_hooks(guard: ExitHold) -> None:
    """Hold this process's main thread at an uncaught exception, and at any exit."""

    def hold(error: BaseException) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not isinstance(error, KeyboardInterrupt):
            sys.stderr.flush()
            guard.hold_exception(describe(error))

    after_uncaught(hold)
    atexit.register(guard.hold_exit)


def after_uncaught(call: Callable[[BaseException], None]) -> None:
    """Call this with an exception that nobody caught, in its thread, after its traceback is out."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        call(error)

    sys.excepthook = hook


def describe(error: BaseException) -> str:
    """An exception's last line."""
    lines = str(error).strip().splitlines()
    name = type(error).__qualname__
    return f"{name}: {lines[-1]}" if lines else name
