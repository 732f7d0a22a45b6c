"""How long steps took over a run, thinned to what a picture can show. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

MOST_POINTS = 500  # of one line; of several notes in one place the slowest is drawn
MOST_LINES = 8  # ranks with a line each; of more, the quickest, the middle and the slowest

Point = tuple[float, float]  # seconds since the epoch, seconds of a step


class PaceNote(NamedTuple):
    """The median times of steps at one moment, by rank."""

    at: float
    times: Mapping[int, float]


def read_note(event: Mapping[str, Any]) -> PaceNote:
    """A line of ``events.jsonl``.

    Raises:
        KeyError, TypeError, ValueError: it is of another version.
    """
    times = dict(zip(map(int, event["ranks"]), map(float, event["median_s"]), strict=True))
    return PaceNote(float(event["time"]), times)


def typical_s(notes: Sequence[PaceNote]) -> float | None:
    """The time of a step in the middle of all notes; ``None``: there is none."""
    found = [median(note.times.values()) for note in notes if note.times]
    return median(found) if found else None


def lines(notes: Sequence[PaceNote], began: float, ended: float) -> dict[str, list[Point]]:
    """Lines to draw, by their name."""
    ranks = {rank for note in notes for rank in note.times}
    found: dict[str, list[Point]] = {}
    if len(ranks) <= MOST_LINES:
        for rank in sorted(ranks):
            points = [(note.at, note.times[rank]) for note in notes if rank in note.times]
            found[f"rank {rank}"] = thinned(points, began, ended)
        return found
    for name, choose in (("slowest", max), ("middle", median), ("quickest", min)):
        points = [(note.at, float(choose(note.times.values()))) for note in notes if note.times]
        found[name] = thinned(points, began, ended)
    return found


def thinned(points: Sequence[Point], began: float, ended: float) -> list[Point]:
    """At most so many of them, evenly over the time; of several in one place the slowest."""
    scale = MOST_POINTS / max(ended - began, 1e-6)
    places: dict[int, list[Point]] = defaultdict(list)
    for point in points:
        places[min(MOST_POINTS - 1, int((point[0] - began) * scale))].append(point)
    return [max(found, key=lambda point: point[1]) for _, found in sorted(places.items())]
