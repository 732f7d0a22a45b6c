"""The scenarios: each runs one job and returns the figures of one or more rows.

Seconds and bytes, as they are; medians and ratios are the report's business.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from processes import activity, marked, proportional, resident
from trial import Side, Stamp, started

LIMIT_S = 60.0  # of each wait; torchrun's slowest here takes about 10
IDLE_S = 5.0  # how long an idle launcher is watched
SETTLE_S = 1.0  # after the last rank is ready, before a launcher counts as idle

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of one side. ``number`` counts up; both sides get the same numbers."""

    side: Side
    nproc: int
    number: int

    @property
    def victim(self) -> int:
        """The rank to kill: each one in turn, rank 0 too."""
        return self.number % self.nproc

    def pause(self) -> None:
        """Wait 0.2-0.5 s, so that the signal comes at any phase of the launcher's polling."""
        time.sleep(0.2 + 0.3 * random.Random(self.number).random())


def training(turn: Turn) -> Figures:
    """Rows about a whole torch command."""
    with started(turn.side, "all_reduce.py", nproc=turn.nproc) as trial:
        ready = trial.wait_for("ready", turn.nproc, limit_s=LIMIT_S)
        last = trial.wait_for("last", turn.nproc, limit_s=LIMIT_S)
        exit_s = trial.wait_exit(limit_s=LIMIT_S)
    return {
        "init": latest(ready) - trial.started_s,
        "command": exit_s - trial.started_s,
        "exit-torch": exit_s - latest(last),
    }


def step(turn: Turn) -> Figures:
    """Row about the first optimizer step."""
    with started(turn.side, "ddp_step.py", nproc=turn.nproc) as trial:
        ready = trial.wait_for("ready", turn.nproc, limit_s=LIMIT_S)
    return {"step": latest(ready) - trial.started_s}


def nothing(turn: Turn) -> Figures:
    """Rows about the launcher itself: the script imports nothing."""
    with started(turn.side, "nothing.py", nproc=turn.nproc) as trial:
        first = trial.wait_for("first", turn.nproc, limit_s=LIMIT_S)
        last = trial.wait_for("last", turn.nproc, limit_s=LIMIT_S)
        exit_s = trial.wait_exit(limit_s=LIMIT_S)
    return {"first-line": latest(first) - trial.started_s, "exit": exit_s - latest(last)}


def restart(turn: Turn) -> Figures:
    """From ``kill -9`` of a rank until all ranks of the next attempt have all-reduced again."""
    # torchrun 2.13 reuses its store by default, and then hardly ever recovers
    fair = Path(turn.side.command[0]).name == "torchrun"
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if fair else {}
    options = ("--max-restarts=1",)
    with started(
        turn.side, "all_reduce.py", "idle", nproc=turn.nproc, options=options, environ=environ
    ) as trial:
        ranks = trial.wait_for("ready", turn.nproc, limit_s=LIMIT_S)
        turn.pause()
        killed_s = kill(ranks, turn.victim)
        again = trial.wait_for("ready", turn.nproc, attempt=1, limit_s=LIMIT_S)
    return {"restart": latest(again) - killed_s}


def notice(turn: Turn) -> Figures:
    """From ``kill -9`` of a rank until the first peer gets SIGTERM."""
    with started(turn.side, "peer.py", nproc=turn.nproc) as trial:
        ranks = trial.wait_for("waiting", turn.nproc, limit_s=LIMIT_S)
        turn.pause()
        killed_s = kill(ranks, turn.victim)
        stamps = trial.wait_for("signalled", 1, limit_s=LIMIT_S)
    return {"notice": min(stamp.at_s for stamp in stamps) - killed_s}


def idle(turn: Turn) -> Figures:
    """Memory and wake-ups while all ranks wait after initialization."""
    with started(turn.side, "all_reduce.py", "idle", nproc=turn.nproc) as trial:
        ranks = trial.wait_for("ready", turn.nproc, limit_s=LIMIT_S)
        time.sleep(SETTLE_S)
        launcher, everyone = trial.process.pid, marked(trial.mark)
        watched = ([launcher], sorted(set(everyone) - {stamp.pid for stamp in ranks}))
        before = [activity(pids) for pids in watched]
        since_s = time.monotonic()
        time.sleep(IDLE_S)
        own, others = (activity(pids) - was for pids, was in zip(watched, before, strict=True))
        spent_s = time.monotonic() - since_s
        return {
            "rss": resident(launcher),
            "pss": proportional(everyone),
            "pss-overhead": proportional(watched[1]),
            "wakeups": own.wakeups / spent_s,
            "wakeups-all": others.wakeups / spent_s,
            "cpu": others.cpu_s / spent_s * 60,
        }


def latest(stamps: Iterable[Stamp]) -> float:
    return max(stamp.at_s for stamp in stamps)


def kill(ranks: Iterable[Stamp], victim: int) -> float:
    """Kill that rank; the time, in CLOCK_MONOTONIC seconds."""
    pid = next(stamp.pid for stamp in ranks if stamp.rank == victim)
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return killed_s


Scenario = Callable[[Turn], Figures]
