"""What a replacement does to the time of a step: a job is compared with its like, by turns.

A machine's speed drifts by more, and within seconds, than is asked about here; and two processes
of one program differ for good. So two jobs train in turns of a fraction of a second, never both.
The ratio of their steps in two turns side by side knows no drift, and that ratio before a death in
one of them, in parts of the same afterwards, no lasting difference.
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

from finished import Board, sent, step_s
from recovery import TEN_MB, is_torchrun
from replacement import guarded
from scenarios import LIMIT_S, Figures, Turn
from trial import TrialError
from workers.board import Finished

HALF_S = 28.0  # before the death, and as much after the replacement
TURN_S = 0.2  # at least; shorter, the ends of turns tell; longer, the drift within a pair does
LEAST = 5  # steps in a turn
SKIPPED = 30  # steps that warm up: of both jobs, and after the replacement


@dataclass(frozen=True, slots=True)
class Job:
    """A job that trains only while nobody holds its ``gate`` (see ``workers/training.py``)."""

    board: Board
    gate: IO[bytes]

    def hold(self) -> None:
        """Let the ranks wait once they have ended their step."""
        fcntl.flock(self.gate, fcntl.LOCK_EX)

    def release(self) -> None:
        """Let the ranks train."""
        fcntl.flock(self.gate, fcntl.LOCK_UN)

    def take_turn(self) -> float:
        """Let it train for a turn; the time of a step, but for the first: the other ends its own.

        Raises:
            TrialError: the job ended, or got nowhere.
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

    Five samples, a good minute each, deviated by 0.065 on a machine with little else to do: about
    40 are needed to know the mean to 0.02, 19 times of 20. The remark below the table says what
    those taken are worth.

    Raises:
        TrialError: a job did not get there, or more than the dead rank was started anew.
    """
    if is_torchrun(turn.side):
        return {}
    with alternating(turn) as struck, alternating(turn) as spared:
        for job in (struck, spared):
            job.board.wait_all(turn.nproc, SKIPPED, LIMIT_S)
        before = beside(struck, spared)
        for job in (struck, spared):  # nobody waits so long that it looks like a hang
            job.release()
        killed_s = sent(struck.board.pids()[turn.victim], signal.SIGKILL)
        back = struck.board.wait_again(turn.nproc, killed_s, LIMIT_S)
        if back.new > 1:
            raise TrialError(f"{back.new} ranks were started anew")
        struck.board.wait_all(turn.nproc, back.step + SKIPPED, LIMIT_S)
        return {"speed": before / beside(struck, spared)}


def certainty(ratios: Sequence[float]) -> str:
    """Say how much all samples together tell; they are two at least."""
    error = 2 * stdev(ratios) / len(ratios) ** 0.5
    return f"{mean(ratios):.3f} +- {error:.3f} in the mean of {len(ratios)} (two standard errors)"


def beside(struck: Job, spared: Job) -> float:
    """The time of a step of one job in parts of the other's; then both wait."""
    struck.hold()
    spared.hold()
    ratios: list[float] = []
    until_s = time.monotonic() + HALF_S
    while time.monotonic() < until_s:
        if len(ratios) % 2:  # who is second gains nothing by it
            mine = struck.take_turn()
            ratios.append(mine / spared.take_turn())
        else:
            other = spared.take_turn()
            ratios.append(struck.take_turn() / other)
    return median(ratios)


@contextmanager
def alternating(turn: Turn) -> Iterator[Job]:
    """Start a training that can be made to wait; at first it is not."""
    with tempfile.NamedTemporaryFile(prefix="msrun-bench-") as gate:
        args = (f"--width={TEN_MB}", f"--turns={gate.name}")
        with guarded(turn.side, *args, nproc=turn.nproc) as (_, board):
            yield Job(board, gate)
