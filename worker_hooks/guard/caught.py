"""Signals that this process catches itself; its forked children have them as they were before."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_libc: Any = ctypes.CDLL(None)
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.signal.restype = ctypes.c_void_p


class Caught:
    """Some signals, from its making to :meth:`restore`."""

    def __init__(
        self, numbers: Iterable[int], heard: Callable[[int, FrameType | None], None]
    ) -> None:
        """Catch them. Called in the main thread.

        Args:
            numbers: the signals.
            heard: called with each in the main thread, as Python does it: perhaps much later.

        Raises:
            ValueError: this is not the main thread, or a number is no signal.
            OSError: a signal cannot be caught.
        """
        self._heard = heard
        self._before: dict[int, Any] = {}
        for number in numbers:
            self._before[number] = signal.signal(number, heard)
            signal.siginterrupt(number, False)  # no call in the script fails by it
        self._mask = threading.local()  # of the thread that forks
        os.register_at_fork(
            before=self._block, after_in_parent=self._unblock, after_in_child=self._forget
        )

    def is_ours(self, number: int) -> bool:
        """Whether the signal is caught here, and the script has not taken it for itself since."""
        return number in self._before and signal.getsignal(number) == self._heard

    def give_way(self, number: int | None = None) -> None:
        """Let the signals do again what they did before; ``number`` does it now.

        May be called in any thread: the main thread would come too late.
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
        self._before.clear()

    # --- a fork: a child that is hit before it has put everything back must not seem its parent ---

    def _block(self) -> None:
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._before.keys())

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _forget(self) -> None:
        self.restore()
        self._unblock()
