"""TensorBoard's writers: each has a thread, which a copy of the process lacks and starts anew.

A writer passes events to its thread by a queue, and the thread appends them to a file of its own.
At the copy the queue is empty and stands still. A copy that wakes cuts each file to the length that
it had then: what the process wrote behind it is written again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

_MODULE = "tensorboard.summary.writer.event_file_writer"
_EMPTY_S = 5.0  # within which a thread writes what it was given
_QUEUED = ("mutex", "not_empty", "not_full", "all_tasks_done", "unfinished_tasks", "queue")


class _Writer(NamedTuple):
    """One thread, and its file as it was at the copy."""

    thread: threading.Thread
    queue: queue.Queue[Any]
    path: str
    nbytes: int


class EventFiles:
    """The writers of this process at one copy."""

    def __init__(self) -> None:
        self.why_not = ""
        self._writers: list[_Writer] = []

    def note(self) -> None:
        """Look at a writer whose queue stands still; ``why_not`` says what is not understood."""
        for thread in _threads():
            try:
                self._writers.append(_noted(thread))
            except (AttributeError, OSError, ValueError) as error:
                self.why_not = f"TensorBoard's writer is not known to go on in a copy ({error})"

    def go_on(self) -> None:
        """In a copy that was woken: write on from there.

        Raises:
            OSError: a file is gone, or no thread can be had.
        """
        for writer in self._writers:
            if os.path.getsize(writer.path) > writer.nbytes:
                os.truncate(writer.path, writer.nbytes)
            waiting = writer.queue
            waiting.mutex = threading.Lock()  # who waited for it is not here
            waiting.not_empty = threading.Condition(waiting.mutex)
            waiting.not_full = threading.Condition(waiting.mutex)
            waiting.all_tasks_done = threading.Condition(waiting.mutex)
            threading.Thread.__init__(writer.thread, name=writer.thread.name, daemon=True)
            writer.thread.start()


def threads() -> frozenset[int]:
    """Identities of the threads that a copy starts anew."""
    return frozenset(map(id, _threads()))


@contextlib.contextmanager
def still() -> Iterator[EventFiles]:
    """All writers have written what they were given, and are given nothing meanwhile."""
    found = EventFiles()
    with contextlib.ExitStack() as held:
        for thread in _threads():
            waiting = getattr(thread, "_queue", None)
            missing = [name for name in _QUEUED if not hasattr(waiting, name)]
            if waiting is None or missing:
                found.why_not = "this TensorBoard's writer is not known"
                break
            held.enter_context(waiting.mutex)
            until = time.monotonic() + _EMPTY_S
            while waiting.unfinished_tasks:
                if not waiting.all_tasks_done.wait(until - time.monotonic()):
                    found.why_not = "TensorBoard's writer does not write what it was given"
                    break
        if not found.why_not:
            found.note()
        yield found


def _threads() -> list[threading.Thread]:
    kind = getattr(sys.modules.get(_MODULE), "_AsyncWriterThread", None)
    return [each for each in threading.enumerate() if type(each) is kind]


def _noted(thread: Any) -> _Writer:
    """Raises ``ValueError`` if it writes elsewhere than to a file of this machine."""
    file = thread._record_writer._writer  # noqa: SLF001  no public ones
    if not type(file).__module__.startswith("tensorboard.") or not file.fs_supports_append:
        raise ValueError(f"it writes by {type(file).__module__}")
    path = os.path.abspath(os.fsdecode(file.filename))
    return _Writer(thread, thread._queue, path, os.path.getsize(path))  # noqa: SLF001  the same
