"""Reads a job's board: each rank's progress, when all ranks train again, and what was lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeVar

from trial import Trial, TrialError
from workers.board import LINE, Finished, read

LOOK_S = 0.005  # between two looks for a step; the ranks themselves write when they finished it

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Again:
    """All ranks train again."""

    at_s: float  # CLOCK_MONOTONIC
    attempt: int
    step: int  # the first step that they finished
    new: int  # processes that replace others


class Board:
    """The lines of one job so far, in the order in which they were written."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._path = trial.output.with_name("board")
        self.lines: list[Finished] = []

    def read(self) -> bool:
        """Read new lines; whether there were any."""
        try:
            with self._path.open("rb") as file:
                file.seek(len(self.lines) * LINE.size)
                octets = file.read()
        except FileNotFoundError:
            return False
        new = read(octets[: len(octets) // LINE.size * LINE.size])
        self.lines += new
        return bool(new)

    def wait_for(self, what: str, found: Callable[[], T | None], limit_s: float) -> T:
        """Wait until ``found`` finds something on the board, and return it.

        Raises:
            TrialError: the launcher ended before, or ``limit_s`` passed.
        """
        deadline = time.monotonic() + limit_s
        while True:
            if self.read() and (it := found()) is not None:
                return it
            if self._trial.ends_within(LOOK_S):
                raise TrialError(f"the launcher ended before {what}; {self._trial.output_tail()}")
            if time.monotonic() > deadline:
                raise TrialError(
                    f"it took more than {limit_s:g} s until {what}; {self._trial.output_tail()}"
                )

    def wait_all(self, nproc: int, step: int, limit_s: float) -> dict[int, int]:
        """Wait until all ranks have finished a step; their process ids, by rank."""

        def arrived() -> dict[int, int] | None:
            pids = {line.rank: line.pid for line in self.lines if line.step >= step}
            return pids if len(pids) == nproc else None

        return self.wait_for(f"all ranks had finished step {step}", arrived, limit_s)

    def pids(self) -> dict[int, int]:
        """The newest process id of each rank."""
        return {line.rank: line.pid for line in self.lines}

    def wait_any(self, step: int, limit_s: float) -> None:
        """Wait until some rank has finished a step."""
        what = f"a rank had finished step {step}"
        self.wait_for(what, lambda: self.lines[-1].step >= step or None, limit_s)

    def wait_again(self, nproc: int, killed_s: float, limit_s: float) -> Again:
        """Wait until all ranks train again."""
        known = {line.pid for line in self.lines if line.at_s <= killed_s}
        begun = len(self.lines)

        def found() -> Again | None:
            new = [line for line in self.lines[begun:] if line.at_s > killed_s]
            return again(new, known, nproc)

        return self.wait_for("all ranks trained again", found, limit_s)


def again(lines: Sequence[Finished], known: Collection[int], nproc: int) -> Again | None:
    """Find in the lines since a death when the last rank had finished its next step.

    That is the first step in which a process takes part that was not ``known`` before. If all ranks
    return to an earlier step, a survivor's end of the interrupted step does not count.
    """
    fresh = [line for line in lines if line.pid not in known]
    if not fresh:
        return None
    attempt = max(line.attempt for line in fresh)
    step = min(line.step for line in fresh if line.attempt == attempt)
    first: dict[int, Finished] = {}
    for line in lines:
        if line.attempt == attempt and line.step >= step:
            first.setdefault(line.rank, line)
    if len(first) < nproc:
        return None
    new = sum(line.pid not in known for line in first.values())
    return Again(max(line.at_s for line in first.values()), attempt, step, new)


def lost(lines: Iterable[Finished], back: Again) -> int:
    """How many steps that some rank had finished are trained again."""
    earlier = (line.step for line in lines if line.attempt < back.attempt)
    return max(0, max(earlier, default=0) - (back.step - 1))


def discarded(lines: Sequence[Finished], killed_s: float, back: Again) -> int:
    """How many batches of all ranks since the death never contributed to an update.

    If an attempt ends with a death, a step that some rank finished had the gradients of all ranks,
    including the dead one. Within an attempt each rank's lines count only for itself.
    """
    together = {line.batch for line in lines if line.attempt < back.attempt}
    missed = 0
    for rank in {line.rank for line in lines}:
        own = [line for line in lines if line.rank == rank and line.batch >= 0]
        before = max((line.batch for line in own if line.at_s <= killed_s), default=-1)
        newest = max((line.batch for line in own), default=-1)
        missed += len(set(range(before + 1, newest)) - together - {line.batch for line in own})
    return missed


def step_s(lines: Iterable[Finished]) -> float:
    """The median time from step to step, over all ranks."""
    by_rank: dict[int, list[float]] = {}
    for line in lines:
        by_rank.setdefault(line.rank, []).append(line.at_s)
    return median(
        later - earlier for times in by_rank.values() for earlier, later in pairwise(times)
    )


def sent(pid: int, signum: int) -> float:
    """Send a signal; the time, in CLOCK_MONOTONIC seconds."""
    at_s = time.monotonic()
    os.kill(pid, signum)
    return at_s
