"""Whether a step takes longer after a replacement: two equal jobs train in turns.

Within seconds a machine's speed changes by more than the effect, and two processes of one program
differ permanently. So two jobs train in turns of a fraction of a second, never both at once. The
ratio of their step times in two neighbouring turns is free of the machine's changes. That ratio
before a death in one of the jobs, divided by the ratio after it, is free of permanent differences.
"""

from __future__ import annotations

import fcntl
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import IO

from recovery import TEN_MB, is_torchrun
from replacement import guarded
from scenarios import LIMIT_S, Figures, Turn
from step_board import Board, sent, step_s
from trial import TrialError
from workers.board import Finished

HALF_S = 28.0  # before the death, and as much after the replacement
TURN_S = 0.2  # at least; the ends disturb shorter turns, the machine's changes longer ones
LEAST = 5  # steps in a turn
SKIPPED = 30  # steps of warm-up: at the start of both jobs, and after the replacement


@dataclass(frozen=True, slots=True)
class Job:
    """A job that trains only while nobody holds its ``gate`` (see ``workers/training.py``)."""

    board: Board
    gate: IO[bytes]

    def hold(self) -> None:
        """Make the ranks wait at the end of their step."""
        fcntl.flock(self.gate, fcntl.LOCK_EX)

    def release(self) -> None:
        """Let the ranks train."""
        fcntl.flock(self.gate, fcntl.LOCK_UN)

    def take_turn(self) -> float:
        """Train for a turn; the time of a step, without the first: the other job ends its own then.

        Raises:
            TrialError: the job ended, or made no progress.
        """
        known, begun_s = len(self.board.lines), time.monotonic()

        def enough() -> Sequence[Finished] | None:
            new = [line for line in self.board.lines[known:] if line.at_s > begun_s]
            is_over = new and new[-1].at_s >= begun_s + TURN_S
            return new if is_over and new[-1].step - new[0].step >= LEAST else None

        self.release()
        steps = self.board.wait_for(f"{LEAST} steps of a turn", enough, LIMIT_S)
        self.hold()
        return step_s(steps)


def speed(turn: Turn) -> Figures:
    """Compare the time of a step before and after a replacement.

    Five samples of about a minute had a deviation of 0.065 on a mostly idle machine: for an error
    of 0.02 in the mean with 95 % confidence, about 40 samples are needed. A remark below the table
    states the error.

    Raises:
        TrialError: a job made no progress, or more ranks than the dead one were started again.
    """
    if is_torchrun(turn.side):
        return {}
    with alternating(turn) as struck, alternating(turn) as spared:
        for job in (struck, spared):
            job.board.wait_all(turn.nproc, SKIPPED, LIMIT_S)
        before = step_ratio(struck, spared)
        for job in (struck, spared):  # a longer wait would look like a hang
            job.release()
        killed_s = sent(struck.board.pids()[turn.victim], signal.SIGKILL)
        back = struck.board.wait_again(turn.nproc, killed_s, LIMIT_S)
        if back.new > 1:
            raise TrialError(f"{back.new} ranks were started again")
        struck.board.wait_all(turn.nproc, back.step + SKIPPED, LIMIT_S)
        return {"speed": before / step_ratio(struck, spared)}


def certainty(ratios: Sequence[float]) -> str:
    """The mean of at least two samples with its error."""
    error = 2 * stdev(ratios) / len(ratios) ** 0.5
    return f"{mean(ratios):.3f} +- {error:.3f} in the mean of {len(ratios)} (two standard errors)"


def step_ratio(struck: Job, spared: Job) -> float:
    """The step time of one job divided by the other's; both jobs wait afterwards."""
    struck.hold()
    spared.hold()
    ratios: list[float] = []
    until_s = time.monotonic() + HALF_S
    while time.monotonic() < until_s:
        if len(ratios) % 2:  # each job is the second one equally often
            mine = struck.take_turn()
            ratios.append(mine / spared.take_turn())
        else:
            other = spared.take_turn()
            ratios.append(struck.take_turn() / other)
    return median(ratios)


@contextmanager
def alternating(turn: Turn) -> Iterator[Job]:
    """Start a training that can be made to wait."""
    with tempfile.NamedTemporaryFile(prefix="msrun-bench-") as gate:
        args = (f"--width={TEN_MB}", f"--turns={gate.name}")
        with guarded(turn.side, *args, nproc=turn.nproc) as (_, board):
            yield Job(board, gate)
