"""The only room that prints for people, and it waits for none of them.

A terminal that is stopped, or a pipe that nobody reads, takes nothing: what is said then waits in a
thread of its own, and supervision goes on.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue

from agent.spec.console import Console

STDERR = 2


class Messages:
    """Says things on stderr, in order."""

    def __init__(self) -> None:
        self._said: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, text: str) -> None:
        """Say it as soon as the console takes it."""
        self._said.put(text.encode(errors="backslashreplace") + b"\n")
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="msrun-voice", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads for this user: better late than never
                self._said.put(None)
                self._run()
            else:
                self._thread = thread

    def close(self, patience_s: float) -> None:
        """Wait until all is said, but no longer than this."""
        if self._thread is not None:
            self._said.put(None)
            self._thread.join(patience_s)

    def _run(self) -> None:
        while (data := self._said.get()) is not None:
            view = memoryview(data)
            try:
                while view:
                    view = view[os.write(STDERR, view) :]
            except OSError:
                continue  # nobody listens any more: not the job's problem


VOICE = Messages()


def say(text: str) -> None:
    """One sentence on stderr."""
    VOICE.put(f"msrun: {text}")


def progress(text: str) -> None:
    """A passing word, for people who wait at a terminal."""
    if os.isatty(STDERR):
        say(text)


CONSOLE = Console(say, VOICE.put, progress)
