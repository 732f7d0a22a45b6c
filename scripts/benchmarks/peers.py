"""Compares replacing a rank with other systems that keep the survivors: torchft and NVRx.

    scripts/bench peers                                kill -9 of a rank, medians of 5 turns
    scripts/bench peers --hang --keep venvs --json result.json
    scripts/bench peers --sharded                      HSDP on 8 ranks, torchrun with saves, too

They are installed into temporary environments; --keep FOLDER keeps those for the next time. The
workload is that of the published figures: 4 ranks, 85 thousand parameters, 50 ms of sleep in a
step, systems that need saves save every ten steps, rank 2 gets the signal at step 57. All ranks of
all sides write the steps that they finish on a board, from which all figures are computed. The
sharded model has two replicas of four ranks each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from peers_install import tools
from peers_outcome import Goal, Outcome, is_reached, lines
from peers_scenarios import HANG, KILL, SHARDED, Way, hang, kill, sharded
from scenarios import Scenario
from table import aligned, machine
from turns import measure, stoppable

SERIES: dict[str, tuple[Scenario, Mapping[str, Way], int, Goal]] = {
    "kill": (kill, KILL, 4, Goal(below_s=0.3, times=6)),
    "hang": (hang, HANG, 4, Goal(below_s=3)),
    "sharded": (sharded, SHARDED, 8, Goal(below_s=1)),
}


def main() -> int:
    options = arguments()
    load = os.getloadavg()[0]
    result: dict[str, object] = {"machine": machine(), "load_before": load}
    missed = False
    with folder(options.keep) as environments:
        for name in ("sharded",) if options.sharded else ("kill", *["hang"] * options.hang):
            scenario, ways, ranks, goal = SERIES[name]
            outcomes = measured(scenario, ways, ranks, environments, options.runs)
            reached = is_reached(outcomes, goal)
            missed |= not reached
            print(f"{scenario.__doc__}\n{ranks} ranks, {machine()}, load before {load:.1f}\n")
            print("\n".join(aligned(list(lines(outcomes)))))
            print(f"\ngoal of msrun: {goal}: {'reached' if reached else 'MISSED'}")
            for failure in (one for outcome in outcomes.values() for one in outcome.failures):
                print(f"failed: {failure}")
            print()
            sides = {side: outcome.document() for side, outcome in outcomes.items()}
            result[name] = {"goal": str(goal), "reached": reached, "sides": sides}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))
    return int(missed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench peers",
        description="Measure replacing a rank beside torchft and NVRx. "
        "Exit status 1: msrun missed a goal.",
    )
    parser.add_argument("--runs", type=int, default=5, help="turns of each side (5)")
    parser.add_argument("--hang", action="store_true", help="stop a rank (SIGSTOP), too")
    parser.add_argument("--sharded", action="store_true", help="instead: HSDP over 8 ranks")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="install there, and keep it")
    parser.add_argument("--json", type=Path, help="write every figure to this file, too")
    options = parser.parse_args()
    if options.hang and options.sharded:
        parser.error("--hang is for the other series: leave --sharded out")
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    if options.keep and options.keep.exists() and not options.keep.is_dir():
        parser.error(f"--keep: {options.keep} is no folder")
    return options


@contextmanager
def folder(kept: Path | None) -> Iterator[Path]:
    """Where the environments are: in a folder to keep, or in a temporary one."""
    if kept:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.absolute()
    else:
        with tempfile.TemporaryDirectory(prefix="msrun-peers-") as name:
            yield Path(name)


def measured(
    scenario: Scenario, ways: Mapping[str, Way], ranks: int, environments: Path, runs: int
) -> dict[str, Outcome]:
    """Take turns among the sides that can be installed."""
    there = {side: tools(environments, way.environment) for side, way in ways.items()}
    sides = [ways[side].side(side, tool.bin_) for side, tool in there.items() if not tool.refusal]
    got = measure(scenario, sides, ranks, [runs] * len(sides))
    return {
        side: Outcome(tool.version, got.get(side), tool.refusal) for side, tool in there.items()
    }


if __name__ == "__main__":
    sys.exit(stoppable(main))
