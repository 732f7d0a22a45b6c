"""Numbers in words, one sentence on stderr, and the bar that shows how far a long reading is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agent.text.sanitize import sanitized

UNKNOWN = "-"
STDERR = 2


def counted(number: int, what: str) -> str:
    """``1 file``, ``3 files``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def say(text: str) -> None:
    """One sentence on stderr."""
    if sys.stderr is not None:
        print(f"msrun: {sanitized(text)}", file=sys.stderr, flush=True)


@contextmanager
def bar(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal; what it gives is told of bytes done.

    Args:
        what: is done, in a word.
        nbytes: altogether; may be told of by several threads.
    """
    if not os.isatty(STDERR):
        yield lambda _nbytes: None
        return
    from rich.console import Console  # slow, and only for people
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True, highlight=False)
    shown = Progress(TextColumn(what), BarColumn(), *columns, console=console, transient=True)
    with shown:
        task = shown.add_task(what, total=nbytes)
        yield lambda more: shown.advance(task, more)
