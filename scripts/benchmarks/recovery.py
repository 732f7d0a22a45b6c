"""The cost of a death: each scenario kills ranks of a training and returns the figures of its rows.

msrun's training is guarded by TrainState, torchrun's saves for itself with ``torch.save``.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from scenarios import LIMIT_S, Figures, Turn, kill, latest
from step_board import Board, again, lost, sent
from trial import Side, Trial, started

TEN_MB = 876  # width of the network: 833 thousand parameters, 10 MB with AdamW's state
EVERY = 50  # steps from save to save while ranks are killed repeatedly
SEED = 1
NO_REPLACING = {"MS_ENABLE_TFT": "{TTP:1,ARF:0}"}

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
    """From ``kill -9`` of a rank until all have finished their next step, with milestones."""
    with training(turn.side, f"--width={TEN_MB}", nproc=turn.nproc) as trial:
        ranks = trial.wait_for("trained", turn.nproc, limit_s=LIMIT_S)
        turn.pause()
        wall_s = time.time() - time.monotonic()
        killed_s = kill(ranks, turn.victim)
        trained = trial.wait_for("trained", turn.nproc, attempt=1, limit_s=LIMIT_S)
        at_s = {
            what: latest(trial.wait_for(what, turn.nproc, attempt=1, limit_s=LIMIT_S))
            for what in STAMPS
        }
        events = milestones(trial.output.parent, MILESTONES)
        repeated = steps_lost(trial, turn.nproc)
    at_s |= {
        what: then_s - wall_s for what, then_s in events.items() if then_s - wall_s >= killed_s
    }
    figures = {what: when_s - killed_s for what, when_s in at_s.items()}
    return figures | {"again": latest(trained) - killed_s, "again-lost": repeated}


def published(turn: Turn) -> Figures:
    """Recover in the workload of the published figures."""
    with training(turn.side, *PUBLISHED, nproc=PUBLISHED_RANKS) as trial:
        ranks = trial.wait_for("marked", PUBLISHED_RANKS, limit_s=LIMIT_S)
        killed_s = kill(ranks, PUBLISHED_VICTIM)
        trained = trial.wait_for("trained", PUBLISHED_RANKS, attempt=1, limit_s=LIMIT_S)
        repeated = steps_lost(trial, PUBLISHED_RANKS)
    return {"published": latest(trained) - killed_s, "published-lost": repeated}


def losses(side: Side, nproc: int, kills: int) -> Iterator[Figures]:
    """Kill random ranks at random moments; after each kill, the steps lost.

    The moments are spread evenly over two intervals between saves, the same on both sides.

    Raises:
        TrialError: the job did not come back.
    """
    chance = random.Random(SEED)
    with training(side, f"--every={EVERY}", nproc=nproc, restarts=kills, replaces=True) as trial:
        board = Board(trial)
        ranks = board.wait_all(nproc, 1, LIMIT_S)
        begun = 0
        for _ in range(kills):
            board.wait_any(begun + 1 + chance.randrange(2 * EVERY), LIMIT_S)
            time.sleep(0.02 * chance.random())
            killed_s = sent(ranks[chance.randrange(nproc)], signal.SIGKILL)
            back = board.wait_again(nproc, killed_s, LIMIT_S)
            yield {"lost": lost(board.lines, back)}
            begun, ranks = back.step - 1, board.pids()


def steps_lost(trial: Trial, nproc: int) -> int:
    """Compare the first attempt's last step with the second's first."""
    board = Board(trial)
    board.read()
    known = {line.pid for line in board.lines if line.attempt == 0}
    back = again([line for line in board.lines if line.attempt > 0], known, nproc)
    assert back is not None, "all ranks have reported that they train again"
    return lost(board.lines, back)


def training(
    side: Side,
    *args: str,
    nproc: int,
    restarts: int = 1,
    replaces: bool = False,
    options: tuple[str, ...] = (),
) -> AbstractContextManager[Trial]:
    """Start the side's own way to train without duration damage by deaths.

    ``replaces``: msrun may also replace the dead rank alone, not only save and restart all.
    """
    # torchrun 2.13 reuses its store by default, and then hardly ever recovers
    if is_torchrun(side):
        worker, environ = "checkpointed.py", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    else:
        worker, environ = "guarded.py", {} if replaces else NO_REPLACING
    restart = f"--max-restarts={restarts}"
    return started(side, worker, *args, nproc=nproc, options=(restart, *options), environ=environ)


def is_torchrun(side: Side) -> bool:
    return Path(side.command[0]).name == "torchrun"


def milestones(folder: Path, names: Mapping[str, str]) -> dict[str, float]:
    """When msrun last noted which event, in seconds since the epoch; empty: it was not msrun.

    ``names``: what each event is called here.
    """
    reached = {}
    for path in folder.glob("state/msrun/runs/*/**/events.jsonl"):
        for event in map(json.loads, path.read_text().splitlines()):
            if event["event"] in names:
                reached[names[event["event"]]] = event["time"]
    return reached
