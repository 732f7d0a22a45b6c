"""Messages of a running job to people, printed without ever blocking the job.

A stopped terminal, or a pipe that nobody reads, takes nothing: messages then wait in a thread of
their own, and supervision continues.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from queue import SimpleQueue

from agent.spec.console import Console
from agent.text.tone import Tone

STDOUT, STDERR = 1, 2
_COLOURS = {Tone.GOOD: "\033[32m", Tone.CAUTION: "\033[33m", Tone.BAD: "\033[31m"}
_RESET = "\033[0m"


class Messages:
    """Prints lines on stderr, in order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, text: str) -> None:
        """Print a line as soon as stderr takes it."""
        self._queue.put(text.encode(errors="backslashreplace") + b"\n")
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="msrun-messages", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the user may have no more threads: print it here
                self._queue.put(None)
                self._run()
            else:
                self._thread = thread

    def close(self, patience_s: float) -> None:
        """Wait until all lines are printed, but no longer than this."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(patience_s)

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(STDERR, view) :]
            except OSError:
                continue  # stderr is closed: the job needs none


MESSAGES = Messages()


def say(text: str) -> None:
    """Print one sentence on stderr."""
    MESSAGES.put(f"msrun: {text}")


def tell(text: str, tone: Tone) -> None:
    """Print one sentence on stderr, on a terminal green or red if it is good or bad news."""
    say(coloured(text, tone, os.environ))


def coloured(text: str, tone: Tone, environ: Mapping[str, str], fd: int = STDERR) -> str:
    """The text in the colour of its tone, where ``fd`` shows colours."""
    code = _COLOURS.get(tone, "") if has_colours(environ, fd) else ""
    return f"{code}{text}{_RESET}" if code else text


def has_colours(environ: Mapping[str, str], fd: int = STDERR) -> bool:
    """Whether ``fd`` shows them, by the conventions of no-color.org and force-color.org."""
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or (
        os.isatty(fd) and environ.get("TERM", "dumb") != "dumb"
    )


def progress(text: str) -> None:
    """Print one sentence if somebody waits at a terminal."""
    if os.isatty(STDERR):
        say(text)


CONSOLE = Console(say, tell, MESSAGES.put, progress)
