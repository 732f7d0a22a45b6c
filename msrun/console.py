"""The only room that prints for people."""

from __future__ import annotations

import contextlib
import sys

from agent.run import Console


def say(text: str) -> None:
    """One sentence on stderr."""
    with contextlib.suppress(OSError, ValueError):  # nobody listens any more: not the job's problem
        print(f"msrun: {text}", file=sys.stderr, flush=True)


def report(text: str) -> None:
    """The failure report on stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def progress(text: str) -> None:
    """A passing word, for people who wait at a terminal."""
    if sys.stderr.isatty():
        say(text)


CONSOLE = Console(say, report, progress)
