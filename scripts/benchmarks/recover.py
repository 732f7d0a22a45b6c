"""Measures the cost of a rank's death: msrun against torchrun with saves and restarts.

msrun replaces the dead rank alone (rows replace and below), or dumps and restarts (rows above).

    scripts/bench recover                              all rows, medians of 5 turns after a warm-up
    scripts/bench recover --rows lost --kills 100 --json result.json

Both sides train one network. msrun's ranks are guarded by TrainState and save only when one dies;
torchrun's save with ``torch.save``: every step, and for steps lost every 50. torchrun runs with
its store sharing off; else its restarts mostly fail.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean

import paired_jobs
import recovery
import replacement
from rows import Goal, Result, Row, pick, three_digits
from scenarios import Figures
from table import document, machine, table
from trial import Side, TrialError
from turns import Measured, measure, progress, stoppable

BIN = Path(sys.executable).parent
SIDES = (Side("torchrun", (str(BIN / "torchrun"),)), Side("msrun", (str(BIN / "msrun"),)))
SHARE = 5  # torchrun gets one kill in so many: it takes 4 to 10 s to recover


def lost(_turn: object) -> Figures:
    """Placeholder for the row that one long job yields; never called."""
    raise NotImplementedError


def often(_turn: object) -> Figures:
    """Placeholder for the rows that one long job of msrun yields; never called."""
    raise NotImplementedError


def ms(key: str, what: str, goal: Goal | None = None) -> Row:
    return Row(key, what, recovery.death, "ms", 1e3, goal or Goal())


def part(key: str, what: str) -> Row:
    return Row(f"replace-{key}", what, replacement.replace, "ms", 1e3)


def grown(key: str, what: str, unit: str = "more") -> Row:
    is_part = unit == "%"  # 2 % is not yet growth, one more open file is
    goal = Goal(below=2 if is_part else 1)
    return Row(f"memory-{key}", what, often, unit, 100 if is_part else 1, goal)


ROWS = (
    ms("dump", "kill -9 -> dump of 10 MB committed", Goal(below=150)),
    Row("again", "kill -9 -> all past their next step", recovery.death, goal=Goal(5)),
    Row("again-lost", "lost there", recovery.death, "steps", goal=Goal(zero=True)),
    ms("noticed", "  -> noticed"),
    ms("frozen", "  -> survivors stand still"),
    ms("written", "  -> state written and compared"),
    ms("stopped", "  -> ranks gone, the next attempt begins"),
    ms("forked", "  -> all ranks started"),
    ms("imported", "  -> all through their imports"),
    ms("restored", "  -> state restored"),
    ms("joined", "  -> process group created"),
    ms("wrapped", "  -> DistributedDataParallel created"),
    Row("published", "the same, 4 ranks, others' workload", recovery.published),
    Row("published-lost", "lost there", recovery.published, "steps", goal=Goal(zero=True)),
    Row(
        "replace",
        "kill -9 -> rank replaced, all past next step",
        replacement.replace,
        goal=Goal(30),
    ),
    Row("replace-lost", "lost there", replacement.replace, "steps", goal=Goal(zero=True)),
    Row("replace-anew", "started again there", replacement.replace, "ranks", goal=Goal(below=2)),
    part("noticed", "  -> noticed"),
    part("frozen", "  -> survivors stand still"),
    part("saved", "  -> state written to memory"),
    part("unblocked", "  -> survivors out of their collective"),
    part("started", "  -> replacement started"),
    part("joined", "  -> all joined, state in place"),
    Row(
        "hang",
        "SIGSTOP -> all past next step, steps of 50 ms",
        replacement.hang,
        goal=Goal(below=3),
    ),
    Row("hang-lost", "lost there", replacement.hang, "steps", goal=Goal(zero=True)),
    Row(
        "large",
        "what 1 GiB more state adds to replace; left: its broadcast",
        replacement.large,
        goal=Goal(0.667),
    ),
    Row("trained", "the same, two thirds of it an optimizer's", replacement.large),
    Row(
        "speed",
        "step time before : after, relative to an equal job",
        paired_jobs.speed,
        "",
        goal=Goal(within=0.02),
    ),
    grown("rss", "resident memory, 5th to last replacement", "%"),
    grown("pss", "  the same, shared pages divided", "%"),
    grown("fds", "  open files"),
    grown("threads", "  threads"),
    grown("sockets", "  sockets"),
    grown("agent", "  msrun's own resident memory", "%"),
    Row("lost", "lost over random kills", lost, "steps", goal=Goal(zero=True, always=True)),
)

PUBLISHED = """\
Others with 4 ranks of this workload, measured once on a quiet machine of 2 cores: DLRover 0.6.1
3.7 s and nothing lost (it copies the state in every step); NVRx ft_launcher 0.4.1 3.9 to 4.1 s
and 7 steps lost; torchrun 3.8 to 4.1 s and 7 steps lost."""


def main() -> int:
    options = arguments()
    load = os.getloadavg()[0]
    results: list[Result] = []
    failures: list[str] = []
    for scenario in dict.fromkeys(row.scenario for row in options.rows):
        if scenario is lost:
            measured = long_jobs(options)
        elif scenario is often:
            measured = replaced_often(options)
        else:
            measured = measure(scenario, SIDES, options.nproc, (options.runs, options.runs))
        left, right = (measured[one.name] for one in SIDES)
        results += (
            Result(row, left.samples(row), right.samples(row))
            for row in options.rows
            if row.scenario is scenario
        )
        failures += left.failures + right.failures
    results.sort(key=lambda result: ROWS.index(result.row))
    print(f"{options.nproc} ranks, {machine()}, load before {load:.1f}; median [min, max]\n")
    print("\n".join(table(results, SIDES)))
    print("\n".join(remarks(results)))
    for failure in failures:
        print(f"failed: {failure}")
    if options.json:
        options.json.write_text(json.dumps(document(results, failures, SIDES, load), indent=2))
    return int(any(result.reached is False for result in results))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench recover",
        description="Measure what a rank's death costs. Exit status 1: a goal was missed.",
        epilog="rows: " + "; ".join(f"{row.key} ({row.what.strip()})" for row in ROWS),
    )
    parser.add_argument("--runs", type=int, default=5, help="turns of each side (5)")
    parser.add_argument("--kills", type=int, default=20, help="msrun's for the row lost (20)")
    parser.add_argument("--replacements", type=int, default=50, help="for the rows memory (50)")
    parser.add_argument("--nproc", type=int, default=8, help="ranks, but in others' workload (8)")
    parser.add_argument("--rows", type=partial(pick, ROWS), default=ROWS, help="(all)")
    parser.add_argument("--json", type=Path, help="write every figure to this file, too")
    options = parser.parse_args()
    if min(options.runs, options.kills, options.nproc - 1) < 1:
        parser.error("--runs and --kills must be at least 1, --nproc 2: a survivor saves")
    if options.replacements <= replacement.EARLY:
        parser.error(f"--replacements must be more than {replacement.EARLY}: it is compared with")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    return options


def long_jobs(options: argparse.Namespace) -> dict[str, Measured]:
    """One job of each side whose ranks are killed repeatedly."""
    measured = {one.name: Measured() for one in SIDES}
    for one, kills in zip(SIDES, (-(-options.kills // SHARE), options.kills), strict=True):
        mine = measured[one.name]
        try:
            for number, figures in enumerate(recovery.losses(one, options.nproc, kills), 1):
                progress(f"lost, {one.name}, kill {number}", figures)
                mine.figures.append(figures)
        except TrialError as error:
            mine.failures.append(f"lost, {one.name}, kill {len(mine.figures) + 1}: {error}")
    return measured


def replaced_often(options: argparse.Namespace) -> dict[str, Measured]:
    """One job of msrun in which ranks are replaced repeatedly."""
    measured = {one.name: Measured() for one in SIDES}
    name, mine = SIDES[1].name, measured[SIDES[1].name]
    try:
        figures = replacement.memory(SIDES[1], options.nproc, options.replacements)
        mine.figures.append(figures)
    except TrialError as error:
        figures = None
        mine.failures.append(f"memory, {name}: {error}")
    progress(f"memory, {name}", figures)
    return measured


def remarks(results: list[Result]) -> Iterator[str]:
    """Remarks below the table."""
    for result in results:
        if result.row.key == "published":
            yield f"\n{PUBLISHED}"
        if result.row.key == "speed" and len(result.right.values) > 1:
            yield f"\n{result.row.what}: {paired_jobs.certainty(result.right.values)}."
        if result.row.key == "lost" and result.left.values and result.right.values:
            left, right = result.left.values, result.right.values
            yield (
                f"\nMean number of steps lost: torchrun, which saves every {recovery.EVERY}, "
                f"{three_digits(mean(left))} over {len(left)} kills "
                f"(expected: {(recovery.EVERY - 1) / 2});\n"
                f"msrun, which saves at a death, {three_digits(mean(right))} over {len(right)}."
            )


if __name__ == "__main__":
    sys.exit(stoppable(main))
