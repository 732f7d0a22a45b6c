"""When a checkpoint is due, so that all ranks save the same steps without a word at any step.

By steps that is plain. By time rank 0's clock decides, and it announces the step to the others a
step ahead, in eight bytes of memory that the ranks of one host share: a rank cannot finish that
step before rank 0 has begun it, behind its announcement, if each step has a collective in it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.layout import UNFINISHED

AHEAD = 2  # steps; one would do
_WORD = struct.Struct("=Q")


class SaveSchedule(Protocol):
    """Asked at each commit."""

    def is_due(self, step: int) -> bool:
        """Whether to save this step."""

    def close(self) -> None:
        """Training is over."""


class Never:
    """Only the last step is saved."""

    def is_due(self, step: int) -> bool:  # noqa: ARG002
        """No."""
        return False

    def close(self) -> None:
        """Nothing."""


class Steps:
    """At multiples of a number; they are counted since training began."""

    def __init__(self, every: int) -> None:
        self._every = every

    def is_due(self, step: int) -> bool:
        """Whether it is one."""
        return step % self._every == 0

    def close(self) -> None:
        """Nothing."""


class Seconds:
    """So long after the time before; for one rank."""

    def __init__(
        self,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        passed_s: float = 0.0,
    ) -> None:
        """Begin; so much of the time has passed already."""
        self._every_s = every_s
        self._clock = clock
        self._since = clock() - passed_s

    def is_due(self, step: int) -> bool:  # noqa: ARG002
        """Whether so much time has passed."""
        now = self._clock()
        if now - self._since < self._every_s:
            return False
        self._since = now
        return True

    def close(self) -> None:
        """Nothing."""


class Announcer:
    """The same for rank 0 of several."""

    def __init__(self, seconds: Seconds, path: Path) -> None:
        """Begin.

        Raises:
            OSError: the file cannot be made.
        """
        self._seconds = seconds
        self._path = path
        self._step = 0
        write_atomic(path, _WORD.pack(0), durable=False)
        self._word = _word(path)

    def is_due(self, step: int) -> bool:
        """Whether this step was announced; announce one, if it is time to."""
        if step == self._step:
            return True
        if step > self._step and self._seconds.is_due(step):
            self._step = step + AHEAD
            _WORD.pack_into(self._word, 0, self._step)
        return False

    def close(self) -> None:
        """Remove the file."""
        self._word.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


class Listener:
    """The same for the other ranks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._word: mmap.mmap | None = None

    def is_due(self, step: int) -> bool:
        """Whether this step was announced."""
        if self._word is None:
            try:
                self._word = _word(self._path)
            except FileNotFoundError:
                return False
        (announced,) = _WORD.unpack_from(self._word, 0)
        return bool(announced == step)

    def close(self) -> None:
        """Look no more."""
        if self._word is not None:
            self._word.close()


def made(
    every_steps: int,
    every_s: int,
    ranks: tuple[int, int],
    path: Callable[[], Path],
    passed_s: float = 0.0,
) -> SaveSchedule:
    """What one rank goes by.

    Args:
        every_steps: comes before the next; 0: not by steps.
        every_s: 0: not by time, either.
        ranks: which one this is, of how many.
        path: where rank 0 announces; asked only if it has to.
        passed_s: so much of the time has passed already.

    Raises:
        OSError: the announcement cannot be made.
    """
    if every_steps:
        return Steps(every_steps)
    if not every_s:
        return Never()
    rank, world_size = ranks
    if rank:
        return Listener(path())
    seconds = Seconds(every_s, passed_s=passed_s)
    if world_size == 1:
        return seconds
    where = path()
    where.parent.mkdir(parents=True, exist_ok=True)
    return Announcer(seconds, where)


def announcement(directory: Path, prefix: str, life: str) -> Path:
    """Where the ranks of one life of a training look."""
    return directory / f".{prefix}.{life}.due{UNFINISHED}"


def _word(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, _WORD.size)
    finally:
        os.close(fd)
