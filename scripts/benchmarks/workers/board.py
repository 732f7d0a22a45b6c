"""The board: ranks append a line for each finished step, and ``scripts/bench`` reads them."""

import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

LINE = struct.Struct("=iiiqqd")


class Finished(NamedTuple):
    """A rank has finished a step: its update is made."""

    rank: int
    attempt: int  # grows whenever the ranks start again
    pid: int
    step: int  # the first is 1
    batch: int  # of this rank's own, the first is 0
    at_s: float  # CLOCK_MONOTONIC: the same clock in every process of the machine


def opened(folder: Path) -> int:
    """Open the board to append lines, one write each, so that none is torn or lost."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    return os.open(folder / "board", flags, 0o600)


def add(board: int, rank: int, attempt: int, step: int, batch: int) -> None:
    line = Finished(rank, attempt, os.getpid(), step, batch, time.monotonic())
    os.write(board, LINE.pack(*line))


def read(octets: bytes) -> list[Finished]:
    """Read complete lines."""
    return [Finished(*fields) for fields in LINE.iter_unpack(octets)]
