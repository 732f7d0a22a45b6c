"""What threads have the event loop of a job call, which may be over by then."""

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
