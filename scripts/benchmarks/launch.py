"""Measures two launchers side by side, by turns, in one run; prints a table, ratios first.

    scripts/bench launch                          all rows, medians of 5 turns after a warm-up
    scripts/bench launch --rows init,notice --runs 3 --json result.json

Each launcher runs the same tiny scripts (``workers/``) with torchrun's options. Ranks report when
they reach a point through a FIFO, so nothing polls while it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from math import inf
from pathlib import Path

import scenarios
from rows import ROWS, Result, Row, Samples
from trial import Side, TrialError

BIN = Path(sys.executable).parent
WARM_UP = -1
GIVE_UP = 3  # failures of a side in a scenario without one success: the rest would fail, too


@dataclass(slots=True)
class Measured:
    """All figures of one scenario on one side."""

    figures: list[scenarios.Figures] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def samples(self, row: Row) -> Samples:
        """Pick one row's figures, in its unit."""
        values = tuple(figures[row.key] * row.scale for figures in self.figures)
        return Samples(values, len(self.failures))


def main() -> int:
    options = arguments()
    sides = both(options.left, options.right)
    load = os.getloadavg()[0]
    results: list[Result] = []
    failures: list[str] = []
    for scenario in dict.fromkeys(row.scenario for row in options.rows):
        measured = measure(scenario, sides, options)
        left, right = (measured[one.name] for one in sides)
        results += (
            Result(row, left.samples(row), right.samples(row))
            for row in options.rows
            if row.scenario is scenario
        )
        failures += left.failures + right.failures
    results.sort(key=lambda result: ROWS.index(result.row))
    print(f"{options.nproc} ranks, {machine()}, load before {load:.1f}; median [min, max]\n")
    print("\n".join(table(results, sides)))
    for failure in failures:
        print(f"failed: {failure}")
    if options.json:
        options.json.write_text(json.dumps(document(results, failures, sides, load), indent=2))
    return int(any(result.reached is False for result in results))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench launch",
        description="Measure two launchers side by side. Exit status 1: a goal was missed.",
        epilog="rows: " + "; ".join(f"{row.key} ({row.what})" for row in ROWS),
    )
    parser.add_argument("--runs", type=int, default=5, help="turns of each side (5)")
    parser.add_argument("--restarts", type=int, default=20, help="right side's restarts (20)")
    parser.add_argument("--nproc", type=int, default=8, help="ranks (8)")
    parser.add_argument("--rows", type=rows, default=ROWS, help="comma-separated (all)")
    parser.add_argument("--json", type=Path, help="write every figure to this file, too")
    parser.add_argument("--left", default=shlex.quote(str(BIN / "torchrun")), help="(torchrun)")
    parser.add_argument("--right", default=shlex.quote(str(BIN / "msrun")), help="(msrun)")
    options = parser.parse_args()
    if min(options.runs, options.restarts, options.nproc) < 1:
        parser.error("--runs, --restarts and --nproc must be at least 1")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    for command in (options.left, options.right):
        if not shlex.split(command) or shutil.which(shlex.split(command)[0]) is None:
            parser.error(f"there is no command {command!r}")
    return options


def rows(text: str) -> tuple[Row, ...]:
    asked = text.split(",")
    if unknown := set(asked) - {row.key for row in ROWS}:
        raise argparse.ArgumentTypeError(
            f"no row {', '.join(sorted(unknown))}; there are {', '.join(row.key for row in ROWS)}"
        )
    return tuple(row for row in ROWS if row.key in asked)


def both(left: str, right: str) -> tuple[Side, Side]:
    """Name the sides after their programs, or by their place if that is the same program."""
    words = tuple(shlex.split(left)), tuple(shlex.split(right))
    names = tuple(Path(each[0]).name for each in words)
    first, second = names if names[0] != names[1] else ("left", "right")
    return Side(first, words[0]), Side(second, words[1])


def measure(
    scenario: scenarios.Scenario, sides: tuple[Side, Side], options: argparse.Namespace
) -> dict[str, Measured]:
    """Take turns: a warm-up of each side, then left, right, left, right ..."""
    measured = {one.name: Measured() for one in sides}
    for one, number in turns(scenario, sides, options):
        mine = measured[one.name]
        if len(mine.failures) >= GIVE_UP and not mine.figures:
            continue
        turn = scenarios.Turn(one, options.nproc, max(number, 0))
        try:
            figures = scenario(turn)
        except TrialError as error:
            figures = None
            mine.failures.append(f"{label(scenario, one, number)}: {error}")
        progress(label(scenario, one, number), figures)
        if figures is not None and number != WARM_UP:
            mine.figures.append(figures)
    return measured


def turns(
    scenario: scenarios.Scenario, sides: tuple[Side, Side], options: argparse.Namespace
) -> Iterator[tuple[Side, int]]:
    left, right = sides
    most = options.restarts if scenario is scenarios.restart else options.runs
    for number in range(WARM_UP, max(most, options.runs)):
        if number < options.runs:
            yield left, number
        if number < most:
            yield right, number


def label(scenario: scenarios.Scenario, one: Side, number: int) -> str:
    turn = "warm-up" if number == WARM_UP else f"turn {number + 1}"
    return f"{scenario.__name__}, {one.name}, {turn}"


def progress(name: str, figures: scenarios.Figures | None) -> None:
    said = ", ".join(f"{key} {value:.4g}" for key, value in (figures or {}).items())
    print(f"{name}: {said or 'failed'}", file=sys.stderr, flush=True)


def table(results: Iterable[Result], sides: tuple[Side, Side]) -> Iterator[str]:
    """Build a Markdown table that is aligned for reading in a terminal, too."""
    said = {True: "yes", False: "NO", None: "-"}
    cells = [["what", "ratio", "goal", "reached", *(one.name for one in sides)]]
    for result in results:
        ratio = "-" if result.ratio is None else f"{result.ratio:.1f}x"
        what = f"{result.row.what} ({result.row.unit})"
        goal, reached = str(result.row.goal), said[result.reached]
        cells.append([what, ratio, goal, reached, str(result.left), str(result.right)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield f"| {' | '.join(padded)} |"


def machine() -> str:
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}"


def document(
    results: Iterable[Result], failures: list[str], sides: tuple[Side, Side], load: float
) -> dict[str, object]:
    """Build what ``--json`` writes: every single figure."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine(),
        "load_before": load,
        "sides": [one.name for one in sides],
        "rows": [
            {
                "row": result.row.key,
                "what": result.row.what,
                "unit": result.row.unit,
                "ratio": None if result.ratio == inf else result.ratio,
                "goal": str(result.row.goal),
                "reached": result.reached,
                **{
                    place: {"median": got.median, "values": got.values, "failed": got.failed}
                    for place, got in (("left", result.left), ("right", result.right))
                },
            }
            for result in results
        ],
        "failures": failures,
    }


if __name__ == "__main__":
    # a stopped benchmark still clears away its processes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
