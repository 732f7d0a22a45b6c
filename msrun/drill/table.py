"""A drill's results as a table for people or as JSON, and its progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agent.text.sanitize import sanitized
from msrun.drill.marathon_verdict import MarathonOutcome, largest_growths
from msrun.drill.random_faults import MARATHON_KINDS
from msrun.terminal.stdout import put
from msrun.terminal.table import UNKNOWN, brief, show_json, table
from msrun.trials.verdict import TrialOutcome

COLUMNS = (
    "fault",
    "noticed",
    "frozen",
    "state copied",
    "step saved",
    "steps lost",
    "training again",
    "answer",
    "weights equal",
    "verdict",
)
_MB = 1e6
_PAIR = "pair"
_KIND_COLUMNS = ("fault", "times", "replaced", "restarted", "resumed", "longest", "steps lost")


def show(outcomes: Sequence[TrialOutcome]) -> None:
    """Print the table on stdout."""
    broken = {outcome.verdict for outcome in outcomes if outcome.broken}
    put(
        table(
            COLUMNS,
            map(row, outcomes),
            styled="verdict",
            style=lambda verdict: "red" if verdict in broken else "green",
            wrapped=COLUMNS,
        )
    )


def row(outcome: TrialOutcome) -> tuple[str, ...]:
    """A drill's cells."""
    size = "" if outcome.dump_bytes is None else f"{outcome.dump_bytes / _MB:.1f} MB"
    took = "" if outcome.dump_s is None else brief(outcome.dump_s)
    return (
        outcome.fault,
        brief(outcome.noticed_s),
        brief(outcome.frozen_s),
        ", ".join(filter(None, (took, size))) or UNKNOWN,
        UNKNOWN if outcome.step_saved is None else str(outcome.step_saved),
        UNKNOWN if outcome.steps_lost is None else str(outcome.steps_lost),
        brief(outcome.training_s),
        outcome.answer or UNKNOWN,
        "yes" if outcome.weights_equal else "no",
        outcome.verdict,
    )


def as_json(reference: dict[str, Any], outcomes: Sequence[TrialOutcome]) -> dict[str, Any]:
    """The results for programs; times in seconds."""
    drills = [{**asdict(each), "answer": each.answer, "verdict": each.verdict} for each in outcomes]
    kept = not reference["trouble"] and not any(outcome.broken for outcome in outcomes)
    return {"ok": kept, "reference": reference, "drills": drills}


def show_marathon(outcome: MarathonOutcome, *, as_json: bool) -> None:
    """Print a marathon's result on stdout: a row for each kind of fault, restarts, processes."""
    if as_json:
        show_json(_marathon_json(outcome))
        return
    put(table(_KIND_COLUMNS, _kind_rows(outcome), styled="steps lost", style=_red_unless_zero))
    for strike, answer in zip(outcome.strikes, outcome.answers, strict=True):
        for reason in answer.restarts:
            put(sanitized(f"restart at step {strike.step}, {strike.words}: {reason}\n"))
    for each in largest_growths(outcome.growths):
        told = f"{each.name}, {each.looks} faults old: {each.first.words}, then {each.last.words}"
        put(f"{told}\n")
    end = outcome.end
    put(f"{end.log_files} log files, {end.log_mb:.1f} MB\n")
    for why in outcome.broken:
        put(sanitized(f"broken: {why}\n"))
    put(
        f"seed {outcome.seed}: {outcome.struck} faults in {outcome.steps} steps, "
        f"{end.took_s:.0f} s: {'bitwise equal' if outcome.is_equal else 'NOT EQUAL'}, "
        f"{'every promise kept' if not outcome.broken else 'promises broken'}\n"
    )


def _kind_rows(outcome: MarathonOutcome) -> Iterator[tuple[str, ...]]:
    """A row for each kind, and one for all pairs."""
    kinds = {kind: each.words for kind, each in MARATHON_KINDS.items()} | {_PAIR: "two at once"}
    found: dict[str, list[int]] = {kind: [] for kind in kinds}
    for index, strike in enumerate(outcome.strikes):
        found[strike.faults[0].kind if len(strike.faults) == 1 else _PAIR].append(index)
    for kind, indices in found.items():
        if indices:
            answers = [outcome.answers[index] for index in indices]
            took = [outcome.strikes[index].took_s for index in indices]
            yield (
                kinds[kind],
                str(len(indices)),
                str(sum(len(answer.replaced) for answer in answers)),
                str(sum(len(answer.restarts) for answer in answers)),
                str(sum(len(answer.exits) for answer in answers)),
                brief(max((each for each in took if each is not None), default=None)),
                str(sum(answer.lost for answer in answers)),
            )


def _red_unless_zero(cell: str) -> str:
    return "" if cell == "0" else "red"


def _marathon_json(outcome: MarathonOutcome) -> dict[str, Any]:
    strikes = [
        {
            "faults": strike.words,
            "time": strike.time,
            "step": strike.step,
            "took_s": strike.took_s,
            "missed": len(strike.missed),
            "replaced": answer.replaced,
            "restarts": answer.restarts,
            "exits": [went._asdict() for went in answer.exits],
            "steps_lost": answer.lost,
        }
        for strike, answer in zip(outcome.strikes, outcome.answers, strict=True)
    ]
    growths = [
        {
            "process": each.name,
            "faults": each.looks,
            "first": each.first._asdict(),
            "last": each.last._asdict(),
        }
        for each in largest_growths(outcome.growths)
    ]
    return {
        "ok": not outcome.broken,
        "seed": outcome.seed,
        "wanted": outcome.wanted,
        "struck": outcome.struck,
        "steps": outcome.steps,
        "equal": outcome.is_equal,
        "broken": outcome.broken,
        "end": asdict(outcome.end),
        "processes": growths,
        "strikes": strikes,
    }


class DrillBar:
    """Shows how far a drill is: a progress bar on stderr, if that is a terminal."""

    def __init__(self) -> None:
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=None)
        self._begun = 0

    def __enter__(self) -> Self:
        if sys.stderr is not None and sys.stderr.isatty():
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def doing(self, what: str) -> None:
        """The next run starts."""
        self._progress.update(self._task, description=what, completed=self._begun)
        self._begun += 1

    def expect(self, total: int) -> None:
        """The number of runs in all."""
        self._progress.update(self._task, total=total)
