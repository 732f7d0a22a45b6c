"""Counts as text, one sentence on stderr, and a progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agent.text.sanitize import sanitized

STDERR = 2


def counted(number: int, what: str) -> str:
    """``1 file``, ``3 files``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def say(text: str) -> None:
    """Print one sentence on stderr."""
    if sys.stderr is not None:
        print(f"msrun: {sanitized(text)}", file=sys.stderr, flush=True)


@contextmanager
def bar(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal.

    Yields:
        A function to call with each number of bytes done, from any thread.
    """
    if not os.isatty(STDERR):
        yield lambda _nbytes: None
        return
    from rich.console import Console  # imported only here: it is slow
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
