"""When a checkpoint is due, so that all ranks save the same steps without communication.

By steps that is simple. By time rank 0's clock decides. It announces the step to the others ahead,
in eight bytes of memory that the ranks of a host share. If each step has a collective, a rank
cannot finish the announced step before rank 0 has begun it, which is after the announcement.
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

from worker_hooks.contract.atomic_file import ensure_folder, write_atomic
from worker_hooks.contract.layout import UNFINISHED

AHEAD = 2  # steps; one would be enough
_STEP = struct.Struct("=Q")


class SaveSchedule(Protocol):
    """Asked at each commit."""

    def is_due(self, step: int) -> bool:
        """Whether to save this step."""

    def close(self) -> None:
        """Training is over."""


class Steps:
    """Due at multiples of so many steps since training began; 0: only the last one."""

    def __init__(self, every: int) -> None:
        self._every = every

    def is_due(self, step: int) -> bool:
        """Whether the step is a multiple."""
        return self._every > 0 and step % self._every == 0

    def close(self) -> None:
        """Nothing."""


class Seconds:
    """Due so many seconds after the time before; for one rank."""

    def __init__(
        self,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        passed_s: float = 0.0,
    ) -> None:
        """Begin; ``passed_s`` of the time have passed already."""
        self._every_s = every_s
        self._clock = clock
        self._since = clock() - passed_s

    def is_due(self, step: int) -> bool:  # noqa: ARG002
        """Whether the time has passed; if so, it begins again."""
        now = self._clock()
        if now - self._since < self._every_s:
            return False
        self._since = now
        return True

    def close(self) -> None:
        """Nothing."""


class Announcer:
    """Due by seconds: rank 0 of several ranks decides, and announces the step."""

    def __init__(self, seconds: Seconds, path: Path) -> None:
        """Begin.

        Raises:
            OSError: the file cannot be made.
        """
        self._seconds = seconds
        self._path = path
        self._step = 0
        write_atomic(path, _STEP.pack(0), durable=False)
        self._announced = _map_step(path)

    def is_due(self, step: int) -> bool:
        """Whether this step was announced; announce a later one if the time has passed."""
        if step == self._step:
            return True
        if step > self._step and self._seconds.is_due(step):
            self._step = step + AHEAD
            _STEP.pack_into(self._announced, 0, self._step)
        return False

    def close(self) -> None:
        """Remove the file."""
        self._announced.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


class Listener:
    """Due by seconds: the other ranks read what was announced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._announced: mmap.mmap | None = None

    def is_due(self, step: int) -> bool:
        """Whether this step was announced."""
        if self._announced is None:
            try:
                self._announced = _map_step(self._path)
            except FileNotFoundError:
                return False
        (announced,) = _STEP.unpack_from(self._announced, 0)
        return bool(announced == step)

    def close(self) -> None:
        """Close the file."""
        if self._announced is not None:
            self._announced.close()


def make_schedule(
    every_steps: int,
    every_s: int,
    ranks: tuple[int, int],
    path: Callable[[], Path],
    passed_s: float = 0.0,
) -> SaveSchedule:
    """The schedule of one rank.

    Args:
        every_steps: takes precedence over ``every_s``; 0: not by steps.
        every_s: 0: not by time, either.
        ranks: which rank this is, of how many.
        path: where rank 0 announces a step; called only if needed.
        passed_s: how much of the time has passed already.

    Raises:
        OSError: the file cannot be made.
    """
    if every_steps or not every_s:
        return Steps(every_steps)
    rank, world_size = ranks
    if rank:
        return Listener(path())
    seconds = Seconds(every_s, passed_s=passed_s)
    if world_size == 1:
        return seconds
    where = path()
    ensure_folder(where.parent)
    return Announcer(seconds, where)


def announcement_file(directory: Path, prefix: str, incarnation: str) -> Path:
    """Where the ranks of one incarnation find the announced step."""
    return directory / f".{prefix}.{incarnation}.due{UNFINISHED}"


def _map_step(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, _STEP.size)
    finally:
        os.close(fd)
