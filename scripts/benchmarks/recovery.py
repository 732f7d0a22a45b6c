"""What a death costs: each scenario kills ranks of a training and returns the figures of its rows.

msrun's training is guarded by TrainState, torchrun's saves for itself with ``torch.save``.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from scenarios import LIMIT_S, Figures, Turn, kill, latest
from trial import Side, Trial, TrialError, started
from workers.board import SPAN

TEN_MB = 876  # width of the network: 833 thousand parameters, 10 MB with AdamW's state
EVERY = 50  # steps from save to save while ranks are killed again and again
LOOK_S = 0.002  # while a step is awaited; nothing is timed there
SEED = 1

# The workload of the published figures: 85 thousand parameters, 50 ms of sleep in a step, a save
# every ten steps, kill -9 of rank 2 of four at step 57.
PUBLISHED = ("--width=256", "--pause=0.05", "--every=10", "--mark=57")
PUBLISHED_RANKS, PUBLISHED_VICTIM = 4, 2

MILESTONES = {  # msrun's events; the last one of a name counts
    "FreezeRanks": "noticed",
    "SaveRanks": "frozen",
    "CommitDump": "written",
    "DumpCommitted": "dump",
    "StartAttempt": "stopped",
    "WorkerStarted": "forked",
}
STAMPS = ("imported", "restored", "joined", "wrapped")  # by the ranks of the next attempt


def death(turn: Turn) -> Figures:
    """``kill -9`` of one rank until all are past their next step, and all milestones between."""
    with training(turn.side, f"--width={TEN_MB}", nproc=turn.nproc) as trial:
        ranks = trial.wait_for("trained", turn.nproc, limit_s=LIMIT_S)
        turn.pause()
        wall_s = time.time() - time.monotonic()
        killed_s = kill(ranks, turn.victim)
        again = trial.wait_for("trained", turn.nproc, attempt=1, limit_s=LIMIT_S)
        reached = {
            what: latest(trial.wait_for(what, turn.nproc, attempt=1, limit_s=LIMIT_S))
            for what in STAMPS
        }
        told = {what: at_s - wall_s for what, at_s in milestones(trial.output.parent).items()}
        lost = Board(trial, turn.nproc).lost(1)
    reached |= {what: at_s for what, at_s in told.items() if at_s >= killed_s}
    figures = {what: at_s - killed_s for what, at_s in reached.items()}
    return figures | {"again": latest(again) - killed_s, "again-lost": lost}


def published(turn: Turn) -> Figures:
    """Recover in the workload of the published figures."""
    with training(turn.side, *PUBLISHED, nproc=PUBLISHED_RANKS) as trial:
        ranks = trial.wait_for("marked", PUBLISHED_RANKS, limit_s=LIMIT_S)
        killed_s = kill(ranks, PUBLISHED_VICTIM)
        again = trial.wait_for("trained", PUBLISHED_RANKS, attempt=1, limit_s=LIMIT_S)
        lost = Board(trial, PUBLISHED_RANKS).lost(1)
    return {"published": latest(again) - killed_s, "published-lost": lost}


def losses(side: Side, nproc: int, kills: int) -> Iterator[Figures]:
    """Kill a random rank at a random moment, again and again; after each, the steps lost.

    The moments are spread evenly over two intervals between saves, the same on both sides.

    Raises:
        TrialError: the job did not come back.
    """
    chance = random.Random(SEED)
    with training(side, f"--every={EVERY}", nproc=nproc, restarts=kills) as trial:
        board = Board(trial, nproc)
        for attempt in range(kills):
            ranks = trial.wait_for("trained", nproc, attempt=attempt, limit_s=LIMIT_S)
            board.wait_for(attempt, chance.randrange(2 * EVERY))
            time.sleep(LOOK_S * 10 * chance.random())
            kill(ranks, chance.randrange(nproc))
            trial.wait_for("trained", nproc, attempt=attempt + 1, limit_s=LIMIT_S)
            yield {"lost": board.lost(attempt + 1)}


def training(
    side: Side, *args: str, nproc: int, restarts: int = 1
) -> AbstractContextManager[Trial]:
    """Start the side's own way to train so that deaths do no lasting harm."""
    # torchrun 2.13 reuses its store by default, and then hardly ever gets there
    is_torchrun = Path(side.command[0]).name == "torchrun"
    return started(
        side,
        "checkpointed.py" if is_torchrun else "guarded.py",
        *args,
        nproc=nproc,
        options=(f"--max-restarts={restarts}",),
        environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if is_torchrun else {},
    )


class Board:
    """Where each rank of each attempt writes how far it is."""

    def __init__(self, trial: Trial, nproc: int) -> None:
        self._path = trial.output.with_name("board")
        self._nproc = nproc

    def wait_for(self, attempt: int, steps: int) -> None:
        """Wait until a rank has finished so many steps more than the first of this attempt.

        Raises:
            TrialError: it takes too long.
        """
        deadline = time.monotonic() + LIMIT_S
        while True:
            begun, newest = self._read(attempt)
            if newest > begun + steps:
                return
            if time.monotonic() > deadline:
                raise TrialError(f"step {begun + 1 + steps} was not reached, only {newest}")
            time.sleep(LOOK_S)

    def lost(self, attempt: int) -> float:
        """Steps any rank of the attempt before had finished, and that are trained once more."""
        return max(0, self._read(attempt - 1)[1] - self._read(attempt)[0])

    def _read(self, attempt: int) -> tuple[int, int]:
        """The step all ranks of the attempt could begin from, and the newest any finished."""
        size = self._nproc * SPAN.size
        with self._path.open("rb") as file:
            file.seek(attempt * size)
            begun, newest = zip(*SPAN.iter_unpack(file.read(size)), strict=True)
        return min(begun), max(newest)


def milestones(folder: Path) -> dict[str, float]:
    """When msrun noted what, in seconds since the epoch; empty: it was not msrun."""
    reached = {}
    for path in folder.glob("state/msrun/runs/*/**/events.jsonl"):
        for event in map(json.loads, path.read_text().splitlines()):
            if event["event"] in MILESTONES:
                reached[MILESTONES[event["event"]]] = event["time"]
    return reached
