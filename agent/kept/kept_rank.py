"""One rank's memory, which is there until its keeper is killed, and the state in it."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from collections.abc import Callable
from weakref import finalize

from worker_hooks.machine.kept_memory import StateMap
from worker_hooks.machine.left_memory import LeftMemory


class KeptRank:
    """Opened while the rank lives; read once it is dead."""

    def __init__(self, keeper: int, board: int) -> None:
        """Open the memory.

        ``keeper``: the process id of the keeper. ``board``: the address of the rank's board.

        Raises:
            OSError: there is no such process, or its memory may not be read.
        """
        self._board = board
        self._keeper = keeper
        # not before a thread has read: their numbers would be those of other files
        opened = list[int]()
        finalize(self, _close_all, opened)
        opened.append(os.pidfd_open(keeper))
        opened.append(os.open(f"/proc/{keeper}/mem", os.O_RDONLY | os.O_CLOEXEC))
        self._process, self._memory = opened
        self._left = LeftMemory(self._memory, board)

    def states(self) -> list[StateMap]:
        """As :meth:`LeftMemory.states`."""
        return self._left.states()

    def checksum(self, state: StateMap, take: Callable[[bytes], object] = len) -> str:
        """As :meth:`LeftMemory.checksum`."""
        return self._left.checksum(state, take)

    def nbytes(self) -> int:
        """How much memory it takes: what no file has and no other process was given."""
        try:
            with open(f"/proc/{self._keeper}/statm") as file:
                _, resident, shared, *_ = map(int, file.read().split())
        except (OSError, ValueError):
            return 0
        return (resident - shared) * mmap.PAGESIZE

    def close(self) -> None:
        """Kill the keeper, with which the memory ends."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)


def _close_all(opened: list[int]) -> None:
    for file in opened:
        os.close(file)
