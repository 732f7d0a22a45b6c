"""Tables, durations and times as text."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.text.sanitize import sanitized
from agent.text.wording import MINUTE_S
from msrun.terminal.stdout import put

UNKNOWN = "-"

PIPE_WIDTH = 10_000  # columns: for a program nothing is wrapped or cut

STYLES = {
    "running": "green",
    "succeeded": "green",
    "failed": "red",
    "lost": "red",
    "holding": "yellow",
    "stopping": "yellow",
    "killing": "yellow",
    "stopped": "yellow",
}

WRAPPED = frozenset({"script", "logs", "exit"})  # columns that a narrow terminal wraps first

ROUNDED_S = 0.9995  # and more is shown in seconds


def show_json(content: object) -> None:
    """Print JSON."""
    put(json.dumps(content, indent=1) + "\n")


def is_terminal() -> bool:
    """Whether stdout is one."""
    return sys.stdout is not None and sys.stdout.isatty()


def plain_console(width: int | None) -> Console:
    """A console to capture text from, in colours only if stdout is a terminal."""
    is_coloured = is_terminal()
    return Console(
        width=width,
        color_system="auto" if is_coloured else None,
        force_terminal=None if is_coloured else False,  # whatever FORCE_COLOR says
        file=sys.stdout if is_coloured else io.StringIO(),
        highlight=False,
        markup=False,
        emoji=False,
    )


def state_style(cell: str) -> str:
    """The colour of a state, such as ``failed`` or ``lost: msrun is gone``."""
    return STYLES.get(cell.partition(":")[0], "")


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    styled: str,
    style: Callable[[str], str] = state_style,
    wrapped: Collection[str] = WRAPPED,
) -> str:
    """A table as text, without trailing blanks.

    Args:
        styled: the column whose cells get a colour.
        style: the colour of such a cell.
        wrapped: columns that a narrow terminal wraps first.
    """
    console = plain_console(None if is_terminal() else PIPE_WIDTH)
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold", no_wrap=column not in wrapped)
    at = columns.index(styled)
    for row in rows:
        cells = [Text(sanitized(cell)) for cell in row]
        cells[at].stylize(style(row[at]))
        grid.add_row(*cells)
    with console.capture() as captured:
        console.print(grid)
    return "".join(line.rstrip() + "\n" for line in captured.get().splitlines())


def brief(seconds: float | None) -> str:
    """``1.25 ms``, ``83 ms``, ``2.5 s``, ``95 s``."""
    if seconds is None:
        return UNKNOWN
    if seconds < ROUNDED_S:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < MINUTE_S else f"{seconds:.0f} s"


def moment(seconds: float) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
