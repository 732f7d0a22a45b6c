"""The result of a side of ``scripts/bench peers``, as a line of a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rows import Samples
from turns import Measured

OURS = "msrun"
WHAT = {
    "again": "every rank past its next step (s)",
    "lost": "steps lost",
    "discarded": "batches never trained",
    "anew": "ranks in new processes",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """All figures of one side. ``refusal``: why there are none, a sentence."""

    version: str
    measured: Measured | None = None
    refusal: str = ""

    @property
    def failures(self) -> list[str]:
        """Failed trials, each with the end of the job's output."""
        return self.measured.failures if self.measured else []

    def samples(self, key: str) -> Samples:
        """All figures of that name."""
        figures = self.measured.figures if self.measured else []
        return Samples(tuple(one[key] for one in figures), len(self.failures))

    def median(self, key: str = "again") -> float | None:
        """The middle figure of that name, if there is any."""
        return self.samples(key).median

    def document(self) -> dict[str, object]:
        """Every single figure, for JSON."""
        figures = {
            key: {"median": self.median(key), "values": self.samples(key).values} for key in WHAT
        }
        return {
            "version": self.version,
            "refusal": self.refusal,
            "figures": figures,
            "failures": self.failures,
        }


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal for msrun's medians; nothing may be lost or discarded."""

    below_s: float
    times: float | None = None  # faster than the best of the others

    def __str__(self) -> str:
        faster = f", {self.times:g}x less than the best of the others" if self.times else ""
        return f"less than {self.below_s:g} s{faster}, and nothing discarded"


def is_reached(outcomes: Mapping[str, Outcome], goal: Goal) -> bool:
    """Whether msrun reached the goal; without another side to compare with it did not."""
    ours = outcomes[OURS]
    mine_s = ours.median()
    if (
        mine_s is None
        or ours.failures
        or any(any(ours.samples(key).values) for key in ("lost", "discarded"))
    ):
        return False
    others = [got for side in outcomes if side != OURS and (got := outcomes[side].median())]
    is_faster = goal.times is None or (bool(others) and min(others) >= goal.times * mine_s)
    return mine_s < goal.below_s and is_faster


def lines(outcomes: Mapping[str, Outcome]) -> Iterator[list[str]]:
    """The rows of a table, its head first."""
    yield ["side", WHAT["again"], "msrun needs", *(WHAT[key] for key in WHAT if key != "again")]
    mine_s = outcomes[OURS].median()
    for side, outcome in outcomes.items():
        name = f"{side} ({outcome.version})" if outcome.version else side
        if outcome.median() is None:
            failed = (one.splitlines()[0].partition(";")[0] for one in outcome.failures)
            yield [name, outcome.refusal or next(failed, "not measured"), "-", "-", "-", "-"]
            continue
        faster = f"1/{outcome.median() / mine_s:.1f}" if mine_s and side != OURS else "-"
        rest = (outcome.samples(key) for key in WHAT if key != "again")
        yield [name, str(outcome.samples("again")), faster, *map(short, rest)]


def short(samples: Samples) -> str:
    """The counts as text: the range if they differ."""
    counts = sorted({round(value) for value in samples.values})
    return " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
