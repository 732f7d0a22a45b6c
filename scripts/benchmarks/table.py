"""The figures as a Markdown table and as JSON."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from math import inf

from rows import Result
from trial import Side


def table(results: Iterable[Result], sides: tuple[Side, Side]) -> Iterator[str]:
    """Build a Markdown table that is aligned for reading in a terminal, too."""
    words = {True: "yes", False: "NO", None: "-"}
    cells = [["what", "ratio", "goal", "reached", *(one.name for one in sides)]]
    for result in results:
        ratio = "-" if result.ratio in {None, inf} else f"{result.ratio:.1f}x"
        what = f"{result.row.what} ({result.row.unit})"
        goal, reached = str(result.row.goal), words[result.reached]
        cells.append([what, ratio, goal, reached, str(result.left), str(result.right)])
    yield from aligned(cells)


def aligned(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Build the lines of a Markdown table, the first of ``cells`` its head."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in (cells[0], ["-" * width for width in widths], *cells[1:]):
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield f"| {' | '.join(padded)} |"


def machine() -> str:
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}"


def document(
    results: Iterable[Result], failures: list[str], sides: tuple[Side, Side], load: float
) -> dict[str, object]:
    """The content of ``--json``: every single figure."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine(),
        "load_before": load,
        "sides": [one.name for one in sides],
        "rows": [
            {
                "row": result.row.key,
                "what": result.row.what,
                "unit": result.row.unit,
                "ratio": None if result.ratio == inf else result.ratio,
                "goal": str(result.row.goal),
                "reached": result.reached,
                **{
                    place: {"median": got.median, "values": got.values, "failed": got.failed}
                    for place, got in (("left", result.left), ("right", result.right))
                },
            }
            for result in results
        ],
        "failures": failures,
    }
