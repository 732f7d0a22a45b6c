"""Measures two launchers in turns, in one run; prints a table with ratios.

    scripts/bench launch                          all rows, medians of 5 turns after a warm-up
    scripts/bench launch --rows init,notice --runs 3 --json result.json

Each launcher runs the same tiny scripts (``workers/``) with torchrun's options. Ranks report when
they reach a point through a FIFO, so that the benchmark does not poll.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

import scenarios
from rows import ROWS, Result, pick
from table import document, machine, table
from trial import Side
from turns import measure, stoppable

BIN = Path(sys.executable).parent


def main() -> int:
    options = arguments()
    sides = both(options.left, options.right)
    load = os.getloadavg()[0]
    results: list[Result] = []
    failures: list[str] = []
    for scenario in dict.fromkeys(row.scenario for row in options.rows):
        most = options.restarts if scenario is scenarios.restart else options.runs
        measured = measure(scenario, sides, options.nproc, (options.runs, most))
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
    parser.add_argument(
        "--rows", type=partial(pick, ROWS), default=ROWS, help="comma-separated (all)"
    )
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


def both(left: str, right: str) -> tuple[Side, Side]:
    """Name the sides after their programs, or by their place if that is the same program."""
    words = tuple(shlex.split(left)), tuple(shlex.split(right))
    names = tuple(Path(each[0]).name for each in words)
    first, second = names if names[0] != names[1] else ("left", "right")
    return Side(first, words[0]), Side(second, words[1])


if __name__ == "__main__":
    sys.exit(stoppable(main))
