"""A drill's results as a table for people or as JSON, and its progress on a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from msrun.drill.verdict import TrialOutcome
from msrun.terminal.stdout import put
from msrun.terminal.table import UNKNOWN, brief, table

COLUMNS = (
    "fault",
    "noticed",
    "frozen",
    "dump",
    "step saved",
    "steps lost",
    "training again",
    "answer",
    "weights equal",
    "verdict",
)
_MB = 1e6


class DrillBar(Protocol):
    """Shows how far a drill is."""

    def doing(self, what: str) -> None:
        """The next run starts."""

    def expect(self, total: int) -> None:
        """The number of runs in all."""


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


def as_json(reference: dict[str, Any], outcomes: Sequence[TrialOutcome]) -> str:
    """The results as JSON; times in seconds."""
    drills = [{**asdict(outcome), "verdict": outcome.verdict} for outcome in outcomes]
    kept = not reference["trouble"] and not any(outcome.broken for outcome in outcomes)
    content = {"ok": kept, "reference": reference}
    return json.dumps({**content, "drills": drills}, indent=1) + "\n"


@contextlib.contextmanager
def bar() -> Iterator[DrillBar]:
    """A progress bar on stderr, if that is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield _Silence()
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Drawn(progress)


class _Silence:
    def doing(self, what: str) -> None:
        del what

    def expect(self, total: int) -> None:
        del total


class _Drawn:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._begun = 0

    def doing(self, what: str) -> None:
        self._progress.update(self._task, description=what, completed=self._begun)
        self._begun += 1

    def expect(self, total: int) -> None:
        self._progress.update(self._task, total=total)
