"""What the failures of a run cost, as its ``status.json`` says, and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agent.accounting.summary import lost, percent
from agent.text.ranges import format_ranges
from agent.text.wording import duration
from msrun.runs.fields import float_or_none, int_or_none
from msrun.terminal.table import UNKNOWN, brief, moment

INCIDENT_COLUMNS = ("incident", "rank", "step", "cause", "answer", "lost", "steps lost")
LONGEST = 100  # characters of a cause in the table


class PastIncident(NamedTuple):
    """A failure and what was done about it; ``None``: not over, or not known."""

    at: float  # seconds since the epoch
    attempt: int  # that broke
    ranks: tuple[int, ...]
    kind: str
    cause: str
    step: int | None  # that was under way
    answer: str
    lost_s: float | None
    lost_steps: int | None

    @property
    def outcome(self) -> str:
        """What was done about it and lost by it; empty: nothing is decided yet."""
        if not self.answer or self.lost_s is None:
            return self.answer
        return f"{self.answer}, {lost(self.lost_s, self.lost_steps)}"


class Cost(NamedTuple):
    """The share of the time that was training, and what was lost; ``None``: not known."""

    share: float | None
    wall_s: float
    lost_s: float | None
    lost_steps: int | None
    incidents: int
    last: tuple[PastIncident, ...]  # the oldest first

    @property
    def words(self) -> str:
        """In one line."""
        count = f"{self.incidents} incident{'' if self.incidents == 1 else 's'}"
        if self.share is None:
            why = "unknown: not every rank has registered a TrainState"
            return f"{why}; {count}" if self.incidents else why
        said = f"{percent(self.share)} of {duration(self.wall_s)} was training"
        if not self.incidents:
            return said
        steps = "unknown" if self.lost_steps is None else str(self.lost_steps)
        return f"{said}; {count}, {brief(self.lost_s)} lost, steps lost: {steps}"


def read_cost(fields: Mapping[str, Any]) -> Cost | None:
    """What the content of a ``status.json`` says; ``None``: it is of an older version.

    Raises:
        KeyError, TypeError, ValueError: it is of another version.
    """
    said = fields.get("goodput")
    if said is None:
        return None
    return Cost(
        share=float_or_none(said["share"]),
        wall_s=float(said["wall_s"]),
        lost_s=float_or_none(said["lost_s"]),
        lost_steps=int_or_none(said["lost_steps"]),
        incidents=int(said["incidents"]),
        last=tuple(map(read_incident, fields["incidents"])),
    )


def read_incident(fields: Mapping[str, Any]) -> PastIncident:
    """One of them, of ``status.json`` or ``events.jsonl``."""
    return PastIncident(
        at=float(fields["at"]),
        attempt=int(fields["attempt"]),
        ranks=tuple(map(int, fields["ranks"])),
        kind=str(fields["kind"]),
        cause=str(fields["cause"]),
        step=int_or_none(fields["step"]),
        answer=str(fields["answer"]),
        lost_s=float_or_none(fields["lost_s"]),
        lost_steps=int_or_none(fields["lost_steps"]),
    )


def incident_rows(incidents: Sequence[PastIncident]) -> list[tuple[str, ...]]:
    """Their cells, the newest first."""
    return [
        (
            moment(one.at),
            format_ranges(one.ranks) or UNKNOWN,
            _cell(one.step),
            _short(one.cause),
            one.answer or UNKNOWN,
            brief(one.lost_s),
            _cell(one.lost_steps),
        )
        for one in reversed(incidents)
    ]


def _short(cause: str) -> str:
    return cause if len(cause) <= LONGEST else f"{cause[: LONGEST - 3]}..."


def _cell(number: int | None) -> str:
    return UNKNOWN if number is None else str(number)
