"""Reports signals to this process to another thread at once.

A Python signal handler runs in the main thread, and a main thread that is blocked in a collective
runs it up to 30 s late. But the interpreter's C handler writes the signal's number to a file
descriptor at once, whichever thread received the signal; the listener reads that descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_MOST = 512  # bytes read at once; each is a signal


class SignalWakeup:
    """A pipe from which the numbers of received signals are read."""

    def __init__(self, numbers: Iterable[int]) -> None:
        """Catch these signals from now on. Called in the main thread.

        Raises:
            ValueError: this is not the main thread, or a number is no signal.
            OSError: a signal cannot be caught.
        """
        self._is_open = True
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._caught = SignalCatcher(numbers, self._called_late)
            # the previous descriptor, for example asyncio's
            self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        except BaseException:
            self._close()
            raise
        os.register_at_fork(after_in_child=self._forget)

    @property
    def fileno(self) -> int:
        """The descriptor; readable when a signal has come."""
        return self._read

    def take(self) -> set[int]:
        """The signals since the last call, of those that are caught here."""
        numbers = b""
        with contextlib.suppress(OSError):  # nothing to read
            numbers = os.read(self._read, _MOST)
        if self._previous_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._previous_fd, numbers)
        return set(filter(self._caught.is_ours, numbers))

    def give_way(self, number: int | None = None) -> None:
        """As :meth:`SignalCatcher.give_way`; in any thread."""
        self._caught.give_way(number)

    def restore(self) -> None:
        """Put everything back as it was. Called in the main thread."""
        self._caught.restore()
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(self._previous_fd if current == self._write else current)

    def _called_late(self, number: int, _frame: FrameType | None) -> None:
        """The Python handler: nothing is left to do, unless the descriptor was replaced."""
        current = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if current != self._write:
            signal.set_wakeup_fd(current)
            with contextlib.suppress(OSError):  # full: the reader is awake already
                os.write(self._write, bytes([number]))

    def _forget(self) -> None:
        """In a forked child, the pipe is the parent's."""
        if self._is_open:
            self.restore()
            self._close()

    def _close(self) -> None:
        self._is_open = False
        for fd in (self._read, self._write):
            os.close(fd)


_libc: Any = ctypes.CDLL(None)
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.signal.restype = ctypes.c_void_p


class SignalCatcher:
    """Catches some signals until :meth:`restore`."""

    def __init__(
        self, numbers: Iterable[int], heard: Callable[[int, FrameType | None], None]
    ) -> None:
        """Catch them. Called in the main thread.

        Args:
            heard: called with each signal, as Python calls a handler: in the main thread, perhaps
                much later.

        Raises:
            ValueError: this is not the main thread, or a number is no signal.
            OSError: a signal cannot be caught.
        """
        self._heard = heard
        self._before: dict[int, Any] = {}
        for number in numbers:
            self._before[number] = signal.signal(number, heard)
            signal.siginterrupt(number, False)  # no system call of the script fails because of it
        self._mask = threading.local()  # of the thread that forks
        os.register_at_fork(
            before=self._block, after_in_parent=self._unblock, after_in_child=self._forget
        )

    def is_ours(self, number: int) -> bool:
        """Whether the signal is caught here, and the script has not set another handler since."""
        return number in self._before and signal.getsignal(number) == self._heard

    def give_way(self, number: int | None = None) -> None:
        """Give the signals their previous effect again, and send ``number`` to this process.

        May be called in any thread, as the main thread might be blocked.
        """
        for each, before in self._before.items():
            if self.is_ours(each):
                _libc.signal(each, int(before is signal.SIG_IGN))  # SIG_DFL is 0, SIG_IGN 1
        if number is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            os.kill(os.getpid(), number)

    def restore(self) -> None:
        """Put everything back as it was. Called in the main thread."""
        for each, before in self._before.items():
            if self.is_ours(each):
                signal.signal(each, signal.SIG_DFL if before is None else before)
        self._before = {}  # another thread may be giving way, by the old one

    # --- fork: signals are blocked until the child has restored its handlers ---------------------

    def _block(self) -> None:
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._before.keys())

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _forget(self) -> None:
        self.restore()
        self._unblock()
