"""The rows of a table: each with its name, unit, scenario and goal."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf, log10
from statistics import median

import scenarios

MIB = float(1 << 20)


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of the right side; a bound that is not set does not count."""

    ratio: float | None = None  # left median / right median, at least
    below: float | None = None  # right median, less than (in the row's unit)
    always: bool = False  # no trial of the right side may fail
    zero: bool = False  # every figure of the right side
    within: float | None = None  # right median, so near to 1

    def __str__(self) -> str:
        bounds = [f">= {self.ratio:g}x"] if self.ratio else []
        bounds += [f"< {self.below:g}"] if self.below else []
        bounds += ["all succeed"] if self.always else []
        bounds += ["all 0"] if self.zero else []
        bounds += [f"1 +- {self.within:g}"] if self.within else []
        return ", ".join(bounds) or "-"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``scale`` turns the scenario's seconds or bytes into ``unit``."""

    key: str
    what: str
    scenario: scenarios.Scenario
    unit: str = "s"
    scale: float = 1.0
    goal: Goal = Goal()


ROWS = (
    Row("init", "start -> all through init + all_reduce", scenarios.training, goal=Goal(5)),
    Row("step", "start -> all past first DDP + AdamW step", scenarios.step, goal=Goal(4)),
    Row("command", "init + all_reduce, whole command", scenarios.training, goal=Goal(6)),
    Row("first-line", "start -> last rank's first line", scenarios.nothing, goal=Goal(6)),
    Row("restart", "kill -9 -> all reduce again", scenarios.restart, goal=Goal(10, always=True)),
    Row("notice", "kill -9 -> noticed", scenarios.notice, "ms", 1e3, Goal(below=10)),
    Row("exit", "last user line -> exit", scenarios.nothing, goal=Goal(8)),
    Row("exit-torch", "the same, script uses torch", scenarios.training),
    Row("rss", "launcher's resident memory", scenarios.idle, "MiB", 1 / MIB, Goal(below=40)),
    Row("pss", "whole job's PSS", scenarios.idle, "MiB", 1 / MIB),
    Row("pss-overhead", "PSS of all but the ranks", scenarios.idle, "MiB", 1 / MIB),
    Row("wakeups", "idle launcher's wake-ups", scenarios.idle, "/s", 1, Goal(below=1)),
    Row("wakeups-all", "wake-ups of all but the ranks", scenarios.idle, "/s", 1),
    Row("cpu", "CPU of all but the ranks, idle", scenarios.idle, "s/min", 1),
)


def pick(among: Sequence[Row], text: str) -> tuple[Row, ...]:
    """The rows that ``--rows`` names: keys separated by commas.

    Raises:
        ArgumentTypeError: there is no such row.
    """
    asked = text.split(",")
    if unknown := set(asked) - {row.key for row in among}:
        raise ArgumentTypeError(
            f"no row {', '.join(sorted(unknown))}; there are {', '.join(row.key for row in among)}"
        )
    return tuple(row for row in among if row.key in asked)


def three_digits(figure: float) -> str:
    """A figure such as 0.0421, 4.52 or 221, without an exponent."""
    digits = max(0, 2 - floor(log10(abs(figure)))) if figure else 0
    return f"{figure:.{min(digits, 4)}f}"


@dataclass(frozen=True, slots=True)
class Samples:
    """One side's figures for one row, in the row's unit, and the number of failed trials."""

    values: Sequence[float]
    failed: int = 0

    @property
    def median(self) -> float | None:
        """The median; ``None``: every trial failed."""
        return median(self.values) if self.values else None

    @property
    def trials(self) -> int:
        """All trials, failed ones included."""
        return len(self.values) + self.failed

    def __str__(self) -> str:
        if not self.trials:
            return "-"
        counts = f" {len(self.values)}/{self.trials} ok" if self.failed else f" n={self.trials}"
        if self.median is None:
            return counts.strip()
        middle, least, most = map(three_digits, (self.median, min(self.values), max(self.values)))
        return f"{middle} [{least}, {most}]{counts}"


@dataclass(frozen=True, slots=True)
class Result:
    """A row with the figures of both sides."""

    row: Row
    left: Samples
    right: Samples

    @property
    def ratio(self) -> float | None:
        """The left median divided by the right one."""
        if self.left.median is None or self.right.median is None:
            return None
        return self.left.median / self.right.median if self.right.median else inf

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; ``None`` without a goal."""
        goal = self.row.goal
        if goal == Goal():
            return None
        if self.right.median is None:
            return False
        return (
            (goal.ratio is None or (self.ratio is not None and self.ratio >= goal.ratio))
            and (goal.below is None or self.right.median < goal.below)
            and not (goal.always and self.right.failed)
            and not (goal.zero and any(self.right.values))
            and (goal.within is None or abs(self.right.median - 1) <= goal.within)
        )
