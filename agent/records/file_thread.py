"""A thread for file work that may take long or never return: one job after the other.

It is a daemon: a disk that answers no more cannot keep the agent from ending.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

THREADS = 8  # more do not make a disk faster


class FileThread:
    """The thread, started when there is something to do; a new one for each dump given up."""

    def __init__(self, call_soon: Callable[..., object]) -> None:
        """``call_soon``: the loop's way to be called from another thread."""
        self._call_soon = call_soon
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left: list[threading.Thread] = []  # at work on what was left behind

    def do(self, job: Callable[[], T], done: Callable[[T | Exception], object]) -> None:
        """Do ``job`` in the thread; ``done`` hears, in the loop, of its result or exception."""

        def work() -> None:
            try:
                result: T | Exception = job()
            except Exception as error:  # noqa: BLE001  whatever it is, the loop must hear of it
                result = error
            self.tell(done, result)

        self._jobs.put(work)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        thread = threading.Thread(
            target=_work, args=(self._jobs,), name="msrun-scribe", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads for this user: the loop waits, and all is saved
            self._jobs.put(None)
            _work(self._jobs)
        else:
            self._thread = thread

    def leave_behind(self) -> None:
        """What is ordered from now on does not wait for what was ordered before."""
        if self._thread is not None:
            self._jobs.put(None)
            self._left = [*filter(threading.Thread.is_alive, self._left), self._thread]
            self._jobs, self._thread = SimpleQueue(), None

    def tell(self, what: Callable[..., object], *args: object) -> None:
        """From the thread: call this in the loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._call_soon(what, *args)

    def close(self, within_s: float) -> None:
        """Let what was ordered be done, but wait no longer than that."""
        self.leave_behind()
        deadline = time.monotonic() + within_s
        for thread in self._left:
            thread.join(max(0.0, deadline - time.monotonic()))


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def side_by_side(do: Callable[[int], None], items: Iterable[int]) -> None:
    """Do something to each item in a few threads: one waits for the disk while others go on.

    Raises:
        Exception: the first that was raised; items not begun by then are left out.
    """
    left, failures = iter(list(items)), list[Exception]()
    taking = threading.Lock()

    def work() -> None:
        while not failures:
            with taking:
                item = next(left, None)
            if item is None:
                return
            try:
                do(item)
            except Exception as error:  # noqa: BLE001  raised in the caller's thread
                failures.append(error)

    threads = []
    with contextlib.suppress(RuntimeError):  # no more threads for this user: this one works, too
        for _ in range(THREADS - 1):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
