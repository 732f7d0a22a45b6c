"""Rich's live displays, such as Lightning's progress bar: a thread draws each again.

A copy of the process lacks the thread and starts it anew. While the process is copied, the thread
is kept out of the display: a lock that it held would stay locked in the copy.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

_MODULE = "rich.live"
_KNOWN = ("rich", "lightning", "pytorch_lightning")  # whose threads of that kind are known
_DRAWN_S = 5.0  # within which a display is drawn


class LiveDisplays:
    """The displays of this process at one copy."""

    def __init__(self) -> None:
        self.why_not = ""
        self._threads: list[Any] = []

    def hold(self, thread: Any) -> Any:
        """The lock of a display, locked; ``None``: it is not known, which ``why_not`` says."""
        lock = getattr(getattr(thread, "live", None), "_lock", None)
        if lock is None or not hasattr(thread, "done"):
            self.why_not = "this Rich's live display is not known"
        elif not lock.acquire(timeout=_DRAWN_S):
            self.why_not = "a live display of Rich is drawn all the time"
        else:
            self._threads.append(thread)
            return lock
        return None

    def go_on(self) -> None:
        """In a copy that was woken: draw on."""
        for thread in self._threads:
            was_done = thread.done.is_set()
            thread.done = threading.Event()  # who waited for it is not here
            threading.Thread.__init__(thread, name=thread.name, daemon=True)
            if not was_done:
                thread.start()


def threads() -> frozenset[int]:
    """Identities of the threads that a copy starts anew."""
    return frozenset(map(id, _threads()))


@contextlib.contextmanager
def still() -> Iterator[LiveDisplays]:
    """No thread draws meanwhile."""
    found = LiveDisplays()
    with contextlib.ExitStack() as held:
        for thread in _threads():
            if (lock := found.hold(thread)) is not None:
                held.callback(lock.release)
        yield found


def _threads() -> list[threading.Thread]:
    kind = getattr(sys.modules.get(_MODULE), "_RefreshThread", ())
    return [
        each
        for each in threading.enumerate()
        if isinstance(each, kind) and type(each).__module__.partition(".")[0] in _KNOWN
    ]
