"""Measures in turns, so that other load of the machine affects both sides."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rows import Row, Samples
from scenarios import Figures, Scenario, Turn
from trial import Side, TrialError

WARM_UP = -1
GIVE_UP = 3  # failures of a side in a scenario without one success: the rest would fail, too


@dataclass(slots=True)
class Measured:
    """All figures of one scenario on one side."""

    figures: list[Figures] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def samples(self, row: Row) -> Samples:
        """One row's figures, in its unit."""
        mine = [figures[row.key] for figures in self.figures if row.key in figures]
        return Samples(tuple(figure * row.scale for figure in mine), len(self.failures))


def measure(
    scenario: Scenario, sides: Sequence[Side], nproc: int, runs: Sequence[int]
) -> dict[str, Measured]:
    """Take turns: a warm-up of each side, then left, right, left, right ...

    ``runs``: how many of each side. By the sides' names.
    """
    measured = {one.name: Measured() for one in sides}
    for one, number in turns(sides, runs):
        mine = measured[one.name]
        if len(mine.failures) >= GIVE_UP and not mine.figures:
            continue
        try:
            figures = scenario(Turn(one, nproc, max(number, 0)))
        except TrialError as error:
            figures = None
            mine.failures.append(f"{label(scenario, one, number)}: {error}")
        progress(label(scenario, one, number), figures)
        if figures is not None and number != WARM_UP:
            mine.figures.append(figures)
    return measured


def turns(sides: Iterable[Side], runs: Sequence[int]) -> Iterator[tuple[Side, int]]:
    for number in range(WARM_UP, max(runs)):
        for one, most in zip(sides, runs, strict=True):
            if number < most:
                yield one, number


def label(scenario: Scenario, one: Side, number: int) -> str:
    turn = "warm-up" if number == WARM_UP else f"turn {number + 1}"
    return f"{scenario.__name__}, {one.name}, {turn}"


def progress(name: str, figures: Figures | None) -> None:
    if figures is None:
        text = "failed"
    else:
        text = ", ".join(f"{key} {value:.4g}" for key, value in figures.items()) or "not measured"
    print(f"{name}: {text}", file=sys.stderr, flush=True)


def stoppable(main: Callable[[], int]) -> int:
    """Run a benchmark; its exit status. If it is stopped, it still ends its processes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return main()
    except KeyboardInterrupt:
        return 130
