"""The columns of ``msrun top``, and which of them fit. Pure.

On a narrow terminal the least important columns are left out first; nothing is ever wrapped. The
chart of step times gets the rest of the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from agent.text.sanitize import sanitized
from msrun.top.facts import SILENT_S, RankFacts
from worker_hooks.contract.status_page import PACES

UNKNOWN = "-"
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = ".:-=+*#@"  # for a terminal without those
LONG_STEP = 0.95  # the quantile of step times at the chart's top
GAP = 1
KIB, MS, MINUTE_S, HOUR_S = 1024, 1000, 60, 3600
HUNDRED = 100


class Column(NamedTuple):
    """One column; those with the lowest ``order`` stay longest."""

    title: str
    order: int
    width: int  # at least
    cell: Callable[[RankFacts], str]
    is_left: bool = False
    is_optional: bool = False  # left out if no rank has a value


def progress(one: RankFacts) -> str:
    """Epoch and step, as the script counts them."""
    return UNKNOWN if one.step is None else f"{(one.epoch or 0) + 1}/{one.step}"


def rate(steps_per_s: float | None) -> str:
    """Three figures."""
    if steps_per_s is None:
        return UNKNOWN
    return f"{steps_per_s:.0f}" if steps_per_s >= HUNDRED else f"{steps_per_s:#.3g}"


def span(seconds: float | None) -> str:
    """``0.8ms``, ``38ms``, ``1.2s``, ``3m``."""
    if seconds is None:
        return UNKNOWN
    if seconds < 1:
        return f"{seconds * MS:.{1 if seconds * MS < 10 else 0}f}ms"  # noqa: PLR2004  two figures
    if seconds < HUNDRED:
        return f"{seconds:.1f}s"
    return (
        f"{seconds / MINUTE_S:.0f}m" if seconds < HUNDRED * MINUTE_S else f"{seconds / HOUR_S:.0f}h"
    )


def silence(seconds: float) -> str:
    """The age of a heartbeat that is older than normal, else nothing."""
    return span(seconds) if seconds >= SILENT_S else ""


def size(nbytes: int | None) -> str:
    """``412M``, ``1.2G``."""
    if nbytes is None:
        return UNKNOWN
    value, units = nbytes / KIB, iter("KMGTP")
    unit = next(units)
    while value >= 1000:  # noqa: PLR2004  at most four characters
        value, unit = value / KIB, next(units)
    return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"  # noqa: PLR2004


def percent(value: float | None) -> str:
    """Whole."""
    return UNKNOWN if value is None else f"{value:.0f}"


CHART = "step time"
# fmt: off
COLUMNS = (
    Column("rank", 0, 4, lambda one: str(one.rank)),
    Column("pid", 9, 7, lambda one: UNKNOWN if one.pid is None else str(one.pid)),
    Column("state", 1, 9, lambda one: sanitized(one.state) or UNKNOWN, is_left=True),
    Column("phase", 4, 8, lambda one: one.phase or UNKNOWN, is_left=True),
    Column("ep/step", 2, 8, progress),
    Column("steps/s", 3, 7, lambda one: rate(one.steps_per_s)),
    Column(CHART, 6, 10, lambda _: "", is_left=True),
    Column("own", 12, 6, lambda one: span(one.own_s)),
    Column("RSS", 8, 5, lambda one: size(one.rss_bytes)),
    Column("CPU%", 7, 4, lambda one: percent(one.cpu_percent)),
    Column("GPU", 11, 5, lambda one: size(one.gpu_bytes), is_optional=True),
    Column("GPU%", 10, 4, lambda one: percent(one.gpu_percent), is_optional=True),
    Column("silent", 5, 6, lambda one: silence(one.silent_s)),
)
# fmt: on


class Fitted(NamedTuple):
    """A column with its width and cells."""

    column: Column
    width: int
    cells: tuple[str, ...]  # one for each row


def fit(rows: Sequence[RankFacts], width: int) -> list[Fitted]:
    """The columns that fit into so many characters, in their order."""
    wanted = [_fitted(column, rows) for column in COLUMNS]
    kept: set[str] = set()
    left = width + GAP
    for one in sorted(wanted, key=lambda one: one.column.order):
        says_nothing = all(cell == UNKNOWN for cell in one.cells)
        if one.width + GAP <= left and not (one.column.is_optional and says_nothing):
            kept.add(one.column.title)
            left -= one.width + GAP
    return [
        one._replace(width=min(PACES, one.width + left)) if one.column.title == CHART else one
        for one in wanted
        if one.column.title in kept
    ]


def _fitted(column: Column, rows: Sequence[RankFacts]) -> Fitted:
    cells = tuple(column.cell(row) for row in rows)
    return Fitted(column, max(column.width, *map(len, cells), 0), cells)


def tallest(rows: Sequence[RankFacts]) -> float:
    """The step time that fills a block: of the slowest rank, without its rare slow steps."""
    longest = (
        sorted(row.step_s)[math.ceil(len(row.step_s) * LONG_STEP) - 1] for row in rows if row.step_s
    )
    return max(longest, default=0.0)


def chart(step_s: Sequence[float], top_s: float, width: int, blocks: str = BLOCKS) -> str:
    """The newest steps as blocks, the newest at the right; a full block: ``top_s`` or more."""
    shown = step_s[-width:]
    if top_s <= 0:
        return ""
    last = len(blocks) - 1
    heights = (min(last, max(0, math.ceil(each / top_s * len(blocks)) - 1)) for each in shown)
    return "".join(blocks[height] for height in heights)
