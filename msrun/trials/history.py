"""Reads what a trial has written: the ranks' traces, msrun's decisions, and saved states.

Only facts; nothing is judged here. Lines that a death has cut off are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from msrun.runs.fields import read_object
from worker_hooks.contract.layout import DUMP, EVENTS, MANIFEST, DrillLayout

Curve = dict[int, tuple[str, ...]]  # step -> its losses, in hexadecimal


@dataclass(slots=True)
class RankLife:
    """One rank in one attempt of one run. Times are monotonic seconds."""

    run: str
    attempt: int
    begun_at: float
    losses: dict[int, list[str]] = field(default_factory=dict)
    commits: dict[int, float] = field(default_factory=dict)
    warnings: list[tuple[float, str]] = field(default_factory=list)  # by the hooks
    is_woken: bool = False  # from a copy of the process: it repeats steps, and loses none


Round = dict[int, RankLife]  # of one attempt, by rank


class FinalState(NamedTuple):
    """A rank's state at the end of training."""

    step: int
    digest: str
    private_digest: str


class Strike(NamedTuple):
    """A fault that struck: wall clock, monotonic clock, and the current step."""

    number: int  # in the plan
    time: float
    at: float
    step: int
    attempt: int


class SavedStep(NamedTuple):
    """A complete dump: its wall-clock time, step and size."""

    time: float
    step: int
    nbytes: int


class DrillExit(NamedTuple):
    """How an msrun of a trial ended."""

    exit_code: int  # negative: a signal
    at: float  # monotonic
    is_killed: bool = False  # by the drill, at the end of a preemption's grace


@dataclass(frozen=True, slots=True)
class DrillHistory:
    """Everything known about a trial."""

    lives: Mapping[int, tuple[RankLife, ...]]  # by rank, in their order
    finals: Mapping[int, FinalState]
    strikes: tuple[Strike, ...] = ()  # in their order
    events: tuple[Mapping[str, Any], ...] = ()  # of all runs, in their order
    dumps: tuple[SavedStep, ...] = ()

    @property
    def last_step(self) -> int:
        """The last step of training."""
        return max((final.step for final in self.finals.values()), default=0)

    def curve(self, rank: int) -> Curve:
        """A rank's losses; those of a repeated step are from its last life."""
        steps: Curve = {}
        for life in self.lives.get(rank, ()):
            steps |= {step: tuple(losses) for step, losses in life.losses.items()}
        return steps

    def rounds(self) -> list[Round]:
        """The lives of all ranks by attempt, in the order of their start."""
        found: dict[tuple[str, int], Round] = {}
        for rank, lives in self.lives.items():
            for life in lives:
                found.setdefault((life.run, life.attempt), {})[rank] = life
        return sorted(found.values(), key=begun)

    def starts(self) -> set[tuple[str, int]]:
        """The runs and attempts in which ranks have begun."""
        return {(life.run, life.attempt) for lives in self.lives.values() for life in lives}


def begun(lives: Round) -> float:
    """When the first of these lives began."""
    return min(life.begun_at for life in lives.values())


def read(folder: Path) -> DrillHistory:
    """The history of the trial in ``folder``."""
    layout = DrillLayout(folder / "traces")
    ranks = sorted(_number(path.stem) for path in layout.folder.glob("rank_*.jsonl"))
    finals = {rank: read_object(layout.final(rank)) for rank in ranks}
    events = [event for path in (folder / "logs").rglob(EVENTS) for event in _lines(path)]
    return DrillHistory(
        lives={rank: tuple(_lives(layout.lines(rank))) for rank in ranks},
        finals={rank: FinalState(**content) for rank, content in finals.items() if content},
        strikes=tuple(sorted(_strikes(layout.folder), key=lambda strike: strike.at)),
        events=tuple(sorted(events, key=lambda event: float(event.get("time", 0)))),
        dumps=tuple(sorted(_dumps(folder / "ckpt"))),
    )


def _lives(path: Path) -> Iterator[RankLife]:
    lives: list[RankLife] = []
    present: dict[object, RankLife] = {}  # by what all lines of a life have in common
    for line in _lines(path):
        of = str(line.get("of")) if isinstance(line, dict) else ""
        life = present.get(of)
        match line:
            case {"life": attempt, "run": run, "at": at}:
                present[of] = RankLife(run, attempt, at, is_woken=bool(line.get("woken")))
                lives.append(present[of])
            case {"loss": loss, "step": step} if life is not None:
                life.losses.setdefault(step, []).append(loss)
            case {"commit": step, "at": at} if life is not None:
                life.commits[step] = at
            case {"warning": text, "at": at} if life is not None:
                life.warnings.append((at, text))
    yield from lives


def _strikes(folder: Path) -> Iterator[Strike]:
    for path in folder.glob("struck_*.json"):
        mark = read_object(path)
        if mark:
            number = _number(path.stem)
            yield Strike(number, mark["time"], mark["at"], mark["step"], mark["attempt"])


def _dumps(folder: Path) -> Iterator[SavedStep]:
    for path in folder.glob(f"{DUMP}*/{MANIFEST}"):
        content = read_object(path)
        if content:
            nbytes = sum(shard["nbytes"] for shard in content["shards"])
            yield SavedStep(content["saved_at"], content["step"], nbytes)


def _number(stem: str) -> int:
    return int(stem.rpartition("_")[2])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        content = path.read_bytes()
    except OSError:
        return
    for line in content.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
