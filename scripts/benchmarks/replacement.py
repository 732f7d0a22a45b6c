"""The cost of replacing a single rank: each scenario returns the figures of its rows.

torchrun is not measured if it has nothing comparable.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import spare_memory
from processes import PROC, field
from recovery import TEN_MB, is_torchrun, milestones, training
from scenarios import LIMIT_S, Figures, Turn, latest
from step_board import Board, lost, sent
from trial import Side, Trial, TrialError, started

GIB = 1024  # MiB
WEIGHTS = GIB // 3
TRAINED = (f"--ballast={WEIGHTS}", f"--moments={GIB - WEIGHTS}")  # as AdamW has them
STEADY = 200  # steps before a rank is stopped: its usual speed is known
EARLY = 5  # replacements after which memory should not grow any more
SETTLE_S = 1.0  # before memory is read
WARM = 3  # steps before a rank is killed
LONG_S = 300.0  # of each wait where the state is large

PARTS = {  # msrun's events; the last one of a name counts
    "FreezeRanks": "noticed",
    "Frozen": "frozen",
    "DumpCommitted": "saved",
    "Rejoining": "unblocked",
    "WorkerStarted": "started",
    "Registered": "joined",
}


def replace(turn: Turn) -> Figures:
    """From ``kill -9`` of a rank until all have finished their next step, with its parts."""
    return struck(turn, signal.SIGKILL, "replace", f"--width={TEN_MB}")


def hang(turn: Turn) -> Figures:
    """From ``SIGSTOP`` of a rank until all have finished their next step; a step takes 50 ms."""
    if is_torchrun(turn.side):
        return {}  # it waits forever
    return struck(turn, signal.SIGSTOP, "hang", f"--width={TEN_MB}", "--pause=0.05", step=STEADY)


def large(turn: Turn) -> Figures:
    """The cost of one more gigabyte of state; on the other side, a plain broadcast of as much.

    It is all weights, which a script makes itself, or for the most part an optimizer's, for which a
    new rank has no memory yet.

    Before the kill a process touches as much memory as will be needed (the memory checkpoint, the
    replacement worker's copy, and one to spare) and frees it: else the figure is mostly the
    hypervisor's, see ``spare_memory.py``. For the same reason the second broadcast is timed.
    """
    if is_torchrun(turn.side):
        with started(turn.side, "broadcast.py", str(GIB), nproc=2) as trial:
            sent_s = latest(trial.wait_for("sent", 2, limit_s=LONG_S))
            warm_s = latest(trial.wait_for("warm", 2, limit_s=LONG_S))
        return {"large": sent_s - warm_s}
    state: dict[str, tuple[str, ...]]
    state = {"": (), "large": (f"--ballast={GIB}",), "trained": TRAINED}
    took_s = {}
    for key, options in state.items():
        args = (f"--width={TEN_MB}", *options)
        took_s[key] = struck(turn, signal.SIGKILL, key, *args, spare=3 * GIB << 20)[key]
    return {key: took_s[key] - took_s[""] for key in ("large", "trained")}


def memory(side: Side, nproc: int, kills: int) -> Figures:
    """Replace ranks of the upper half repeatedly; how much more the lower half holds then.

    Memory relative to that after the fifth replacement, the rest in counts.

    Raises:
        TrialError: the job did not recover, or all ranks were started again.
    """
    stay = nproc - nproc // 2
    options = (f"--max-replacements={2 * kills}",)  # a replacement may itself need a second one
    held: dict[int, list[Held]] = {}
    with guarded(side, nproc=nproc, options=options) as (trial, board):
        board.wait_all(nproc, 1, LIMIT_S)
        for number in range(1, kills + 1):
            victim = stay + number % (nproc - stay)
            killed_s = sent(board.pids()[victim], signal.SIGKILL)
            back = board.wait_again(nproc, killed_s, LIMIT_S)
            if back.new > 1:
                raise TrialError(f"death {number}: {back.new} ranks were started again")
            if number in {EARLY, kills}:
                time.sleep(SETTLE_S)
                held[number] = [holding(trial.process.pid)]
                held[number] += (holding(board.pids()[rank]) for rank in range(stay))
    (agent, *ranks), (agent_then, *ranks_then) = held[kills], held[EARLY]
    return {
        **{f"memory-{what}": most(what, ranks, ranks_then) for what in ranks[0]},
        "memory-agent": most("rss", [agent], [agent_then]),
    }


Held = dict[str, float]


def holding(pid: int) -> Held:
    """What a process holds now: memory in KiB, and counts."""
    proc = PROC / str(pid)
    targets = []
    for path in Path(proc / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            targets.append(os.readlink(path))
    return {
        "rss": field(proc / "smaps_rollup", "Rss"),
        "pss": field(proc / "smaps_rollup", "Pss"),
        "threads": len(list((proc / "task").iterdir())),
        "fds": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
    }


def most(what: str, after: Sequence[Held], before: Sequence[Held]) -> float:
    """The growth of the process that grew most: relative for memory, else in counts."""
    grown = [(late[what], early[what]) for late, early in zip(after, before, strict=True)]
    if what in {"rss", "pss"}:
        return max(late / early - 1 for late, early in grown)
    return max(late - early for late, early in grown)


def struck(
    turn: Turn, signum: int, key: str, *args: str, step: int = WARM, spare: int = 0
) -> Figures:
    """Send a signal to one rank; the time until all ranks have finished their next step.

    ``spare``: bytes of memory that are given back right before.
    """
    with guarded(turn.side, *args, nproc=turn.nproc) as (trial, board):
        ranks = board.wait_all(turn.nproc, step, LONG_S)
        with spare_memory.held(spare):
            turn.pause()
        wall_s = time.time() - time.monotonic()
        killed_s = sent(ranks[turn.victim], signum)
        back = board.wait_again(turn.nproc, killed_s, LIMIT_S)
        events = milestones(trial.output.parent, PARTS)
    parts = {f"{key}-{what}": then_s - wall_s - killed_s for what, then_s in events.items()}
    return {
        key: back.at_s - killed_s,
        f"{key}-lost": lost(board.lines, back),
        f"{key}-anew": back.new,
        **{what: part_s for what, part_s in parts.items() if part_s >= 0},
    }


@contextmanager
def guarded(
    side: Side, *args: str, nproc: int, options: tuple[str, ...] = ()
) -> Iterator[tuple[Trial, Board]]:
    """Start the side's training, and read its board."""
    with training(side, *args, nproc=nproc, replaces=True, options=options) as trial:
        yield trial, Board(trial)
