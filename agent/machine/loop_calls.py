"""What the event loop of a job is to call: from threads, when it may be over, or not too often."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

CallSoon = Callable[..., object]
"""The loop's method that another thread may call."""


def until_closed(call_soon: CallSoon) -> CallSoon:
    """The loop's ``call_soon_threadsafe``, which does nothing once the loop is closed."""

    def call(what: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the job is over: nobody waits
            call_soon(what, *args)

    return call


class OnceATurn:
    """Calls something, but once in a turn of the loop: thousands ask for it in one."""

    def __init__(self, call_soon: CallSoon, call: Callable[[], object]) -> None:
        """``call_soon``: the loop's."""
        self._call_soon = call_soon
        self._call = call
        self._was_called = False  # in this turn

    def __call__(self, *, is_sure: bool) -> None:
        """``is_sure``: even if it was called in this turn already."""
        if is_sure or not self._was_called:
            if not self._was_called:
                self._was_called = True
                self._call_soon(self._end_turn)
            self._call()

    def _end_turn(self) -> None:
        self._was_called = False
