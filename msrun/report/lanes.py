"""The timelines of ranks as lanes of so many cells, equal ones folded into one. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msrun.report.timeline import Doing, Span

CELLS = 1000
MOST = 40  # lanes that are drawn


class Lane(NamedTuple):
    """Ranks whose timelines look the same."""

    ranks: tuple[int, ...]
    runs: tuple[tuple[int, int, Doing], ...]  # first cell, cell after the last, what they did
    marks: tuple[int, ...]  # cells in which these ranks failed
    is_rest: bool = False  # ranks that are not drawn


def lanes(
    spans: Mapping[int, Sequence[Span]],
    failures: Iterable[tuple[float, Sequence[int]]],
    began: float,
    ended: float,
) -> list[Lane]:
    """The lanes, ordered by rank; if there are too many, those with most failures are drawn.

    ``began``: seconds since the epoch.
    """
    scale = CELLS / max(ended - began, 1e-6)
    marks: dict[int, set[int]] = defaultdict(set)
    for at, ranks in failures:
        cell = min(CELLS - 1, max(0, int((at - began) * scale)))
        for rank in ranks:
            marks[rank].add(cell)
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank in sorted(spans):
        runs = _runs([((at - began) * scale, doing) for at, doing in spans[rank]])
        alike[runs, tuple(sorted(marks[rank]))].append(rank)
    found = [Lane(tuple(ranks), *key) for key, ranks in alike.items()]  # type: ignore[arg-type]
    if len(found) <= MOST:
        return found
    worst = sorted(found, key=lambda lane: (-len(lane.marks), lane.ranks))[:MOST]
    drawn = {lane.ranks for lane in worst}
    rest = tuple(rank for lane in found if lane.ranks not in drawn for rank in lane.ranks)
    return [*sorted(worst, key=lambda lane: lane.ranks), Lane(rest, (), (), is_rest=True)]


def _runs(spans: Sequence[tuple[float, Doing]]) -> tuple[tuple[int, int, Doing], ...]:
    """Equal cells in a row; a cell shows what took most of it. ``spans``: since when, in cells."""
    cells: list[Doing] = [Doing.OVER] * CELLS
    parts: dict[int, dict[Doing, float]] = defaultdict(lambda: defaultdict(float))
    ends = [*(at for at, _ in spans[1:]), float(CELLS)]
    for (begin, doing), end in zip(spans, ends, strict=True):
        since = min(max(0.0, begin), float(CELLS))
        until = min(max(since, end), float(CELLS))  # a clock may have been set back
        first, last = int(since), int(until)
        if since >= until:
            continue
        if first == last:
            parts[first][doing] += until - since
            continue
        parts[first][doing] += first + 1 - since
        cells[first + 1 : last] = [doing] * (last - first - 1)
        if last < CELLS:
            parts[last][doing] += until - last
    for cell, shares in parts.items():
        cells[cell] = max(shares, key=lambda doing: shares[doing])
    found: list[tuple[int, int, Doing]] = []
    for cell, doing in enumerate(cells):
        if found and found[-1][2] is doing:
            found[-1] = (found[-1][0], cell + 1, doing)
        else:
            found.append((cell, cell + 1, doing))
    return tuple(found)
