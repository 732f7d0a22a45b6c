"""A drill's results as a table for people or as JSON, and its progress on a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from msrun.drill.verdict import TrialOutcome
from msrun.terminal.stdout import put

NONE = "-"
PIPE_WIDTH = 10_000  # columns: nothing is wrapped for a reader that is a program
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
_SECOND_S = 1.0


class DrillBar(Protocol):
    """Tells how far a drill is."""

    def doing(self, what: str) -> None:
        """The next run begins."""

    def expect(self, total: int) -> None:
        """There will be so many runs in all."""


def show(outcomes: Sequence[TrialOutcome]) -> None:
    """The table, on stdout."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    console = Console(
        width=None if is_terminal else PIPE_WIDTH,
        color_system="auto" if is_terminal else None,
        force_terminal=None if is_terminal else False,
        file=sys.stdout if is_terminal else io.StringIO(),
        highlight=False,
        markup=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for outcome in outcomes:
        *cells, verdict = row(outcome)
        table.add_row(*cells, Text(verdict, style="red" if outcome.broken else "green"))
    with console.capture() as captured:
        console.print(table)
    put("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def row(outcome: TrialOutcome) -> tuple[str, ...]:
    """A drill's cells."""
    size = "" if outcome.dump_bytes is None else f"{outcome.dump_bytes / _MB:.1f} MB"
    took = "" if outcome.dump_s is None else span(outcome.dump_s)
    return (
        outcome.fault,
        span(outcome.noticed_s),
        span(outcome.frozen_s),
        ", ".join(filter(None, (took, size))) or NONE,
        NONE if outcome.step_saved is None else str(outcome.step_saved),
        NONE if outcome.steps_lost is None else str(outcome.steps_lost),
        span(outcome.training_s),
        outcome.answer or NONE,
        "yes" if outcome.weights_equal else "no",
        outcome.verdict,
    )


def span(seconds: float | None) -> str:
    """``12 ms``, ``1.24 s``."""
    if seconds is None:
        return NONE
    return f"{seconds * 1000:.0f} ms" if seconds < _SECOND_S else f"{seconds:.2f} s"


def as_json(reference: dict[str, Any], outcomes: Sequence[TrialOutcome]) -> str:
    """The same for programs; times in seconds."""
    drills = [{**asdict(outcome), "verdict": outcome.verdict} for outcome in outcomes]
    kept = not reference["trouble"] and not any(outcome.broken for outcome in outcomes)
    content = {"ok": kept, "reference": reference}
    return json.dumps({**content, "drills": drills}, indent=1) + "\n"


@contextlib.contextmanager
def bar() -> Iterator[DrillBar]:
    """A progress bar on stderr where that is a terminal; else nothing."""
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
