"""The training of a demo: real processes that anybody may kill, and what is seen of them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from msrun.drill.marathon_job import MarathonJob
from msrun.runs.json_lines import JsonLines
from msrun.trials.exit_verdict import steps_lost
from msrun.trials.history import DrillHistory, read
from msrun.trials.trial import Command
from worker_hooks.contract.process_stat import read_stat

STARTS_S = 60.0  # of all ranks, or of a job that is resumed
NEW_S = 4.0  # so long a replaced rank is shown as new
OPTIONS = ("--max-restarts=1000", "--max_replacements=1000000")


class Is(Enum):
    """What a rank does, for its lane."""

    STARTING = "starting"
    TRAINING = "training"
    DEAD = "killed"
    STOPPED = "stopped"
    NEW = "replaced"
    RESUMING = "msrun is resumed"
    DONE = "done"


class Lane(NamedTuple):
    """One rank at one moment."""

    rank: int
    pid: int  # 0: none
    step: int
    does: Is


class Sight(NamedTuple):
    """The whole training at one moment."""

    lanes: tuple[Lane, ...]
    losses: tuple[float, ...]  # of rank 0, by step
    kills: int = 0
    lost_steps: int = 0
    lost_s: float = 0.0
    news: str = ""

    @property
    def step(self) -> int:
        """The newest step of all."""
        return max((lane.step for lane in self.lanes), default=0)


class DemoTraining:
    """A job that is started, struck, resumed if msrun itself was killed, and seen to its end."""

    def __init__(
        self, folder: Path, program: Sequence[str], environ: Mapping[str, str], ranks: int
    ) -> None:
        """Start nothing yet.

        Args:
            folder: for all its files; made here.
            program: the script and its arguments.
            environ: of msrun.
            ranks: how many.
        """
        self.folder = folder
        self._ranks = ranks
        command = Command((f"--worker_num={ranks}", *OPTIONS), tuple(program))
        self.job = MarathonJob(folder, command, environ, ranks, keeps_ckpt=False)
        self._losses: dict[int, float] = {}
        self._trace = JsonLines(folder / "traces" / "rank_0.jsonl")
        self._first = dict.fromkeys(range(ranks), 0)  # the pid that is not new
        self._new_until = dict.fromkeys(range(ranks), 0.0)
        self._struck: dict[int | None, str] = {}  # whom, until all train again; None: msrun
        self._struck_at = 0.0
        self._kills, self._lost_s, self._lost_steps = 0, 0.0, 0
        self._news = ""
        self.is_over = False

    def start(self) -> None:
        """Start msrun."""
        self.job.start()

    def look(self) -> Sight:
        """Read what is new; resume the job if its msrun is gone.

        Raises:
            StuckError: it cannot be resumed.
        """
        self.job.look()
        if not self.is_over and self.job.has_ended():
            self.job.end_run(STARTS_S)
            if self.job.has_succeeded():
                self.is_over = True
            else:
                self.job.resume()
        for line in self._trace.new():
            match line:
                case {"loss": loss, "step": step}:
                    self._losses[step] = float.fromhex(loss)
        now = time.monotonic()
        lanes = tuple(self._lane(rank, now) for rank in range(self._ranks))
        self._note_recovery(lanes, now)
        losses = tuple(loss for _, loss in sorted(self._losses.items()))
        return Sight(lanes, losses, self._kills, self._lost_steps, self._lost_s, self._news)

    def strike(self, rank: int | None, signum: int = signal.SIGKILL) -> None:
        """Signal a rank, or msrun itself."""
        pid = self.job.pid if rank is None else self.job.rank(rank)
        if self.is_over or not pid or self.job.has_ended():
            return
        who = "msrun itself" if rank is None else f"rank {rank}"
        what = "kill -9" if signum == signal.SIGKILL else "kill -STOP"
        os.kill(pid, signum)
        self._kills += 1
        self.job.look()
        step = 1 + (self.job.newest if rank is None else self.job.steps[rank])
        self._news = f"{what} of {who} (pid {pid}) in step {step}"
        if not self._struck:  # else one recovery for both
            self._struck_at = time.monotonic()
        self._struck[rank] = self._news

    def stop_one(self) -> None:
        """Stop a rank that trains: alive, but never a step further."""
        alive = [rank for rank in range(self._ranks) if self.job.rank(rank)]
        if alive:
            self.strike(random.choice(alive), signal.SIGSTOP)

    def history(self) -> DrillHistory:
        """Everything that was recorded."""
        return read(self.folder)

    def close(self) -> None:
        """End what still runs."""
        self.job.close()

    def _lane(self, rank: int, now: float) -> Lane:
        pid, step = self.job.rank(rank) or 0, self.job.steps[rank]
        if pid and pid != self._first[rank]:
            if self._first[rank]:
                self._new_until[rank] = now + NEW_S
            self._first[rank] = pid
        if self.is_over:
            return Lane(rank, pid, step, Is.DONE)
        found = read_stat(pid) if pid else None
        if found is None:
            return Lane(rank, 0, step, self._absent(rank))
        if found.state == "T":
            return Lane(rank, pid, step, Is.STOPPED)
        if now < self._new_until[rank]:
            return Lane(rank, pid, step, Is.NEW)
        return Lane(rank, pid, step, Is.TRAINING if step else Is.STARTING)

    def _absent(self, rank: int) -> Is:
        if None in self._struck:
            return Is.RESUMING
        if rank in self._struck:
            return Is.DEAD
        return Is.DONE if self._first[rank] else Is.STARTING

    def _note_recovery(self, lanes: Sequence[Lane], now: float) -> None:
        if not self._struck or not (self.is_over or self.job.trained(1, self._struck_at)):
            return
        took_s = now - self._struck_at
        self._lost_s += took_s
        self._lost_steps = steps_lost(self.history()) or 0
        lost = f"{self._lost_steps} steps lost" if self._lost_steps else "no step lost"
        (rank, words), *more = self._struck.items()
        pid = f", new pid {lanes[rank].pid}" if rank is not None and not more else ""
        words = ", ".join((words, *(each for _, each in more)))
        self._news = f"{words}: back after {took_s:.1f} s{pid}, {lost}"
        self._struck.clear()
