"""Signals to this process, told to another thread at once.

A Python signal handler runs in the main thread, and one that is blocked in a collective runs it up
to 30 s late. The interpreter's own handler in C, though, writes the signal's number to a file
descriptor at once, whichever thread was hit; the listener reads it there.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from types import FrameType

from worker_hooks.guard.caught import Caught

_ROOM = 512  # bytes read at once; each is a signal


class Wakeup:
    """The end of a pipe that signals' numbers come out of."""

    def __init__(self, numbers: Iterable[int]) -> None:
        """Catch these signals from now on. Called in the main thread.

        Raises:
            ValueError: this is not the main thread, or a number is no signal.
            OSError: a signal cannot be caught.
        """
        self._is_open = True
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._caught = Caught(numbers, self._late)
            # whose descriptor it was before, asyncio's say
            self._theirs = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        except BaseException:
            self._close()
            raise
        os.register_at_fork(after_in_child=self._forget)

    @property
    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._read

    def take(self) -> set[int]:
        """The signals that have come since the last call, of those that are caught here."""
        numbers = b""
        with contextlib.suppress(OSError):  # nothing there
            numbers = os.read(self._read, _ROOM)
        if self._theirs >= 0:
            with contextlib.suppress(OSError):
                os.write(self._theirs, numbers)
        return set(filter(self._caught.is_ours, numbers))

    def give_way(self, number: int | None = None) -> None:
        """As :meth:`Caught.give_way`: in any thread."""
        self._caught.give_way(number)

    def restore(self) -> None:
        """Put everything back as it was. Called in the main thread."""
        self._caught.restore()
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(self._theirs if current == self._write else current)

    def _late(self, number: int, _frame: FrameType | None) -> None:
        """In the main thread: nothing is left to do, unless the descriptor is another's by now."""
        current = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if current != self._write:
            signal.set_wakeup_fd(current)
            with contextlib.suppress(OSError):  # full: it is told already
                os.write(self._write, bytes([number]))

    def _forget(self) -> None:
        """In a forked child: the pipe is the parent's."""
        if self._is_open:
            self.restore()
            self._close()

    def _close(self) -> None:
        self._is_open = False
        for fd in (self._read, self._write):
            os.close(fd)
