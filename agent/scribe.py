"""A thread for file work that may take long or never return: one job after the other.

It is a daemon: a disk that answers no more cannot keep the agent from ending.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

THREADS = 8  # more do not make a disk faster


class Scribe:
    """The thread, started when there is something to do."""

    def __init__(self, call_soon: Callable[..., object]) -> None:
        """``call_soon``: the loop's way to be called from another thread."""
        self._call_soon = call_soon
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

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
            self._thread = threading.Thread(target=self._work, name="msrun-scribe", daemon=True)
            self._thread.start()

    def tell(self, what: Callable[..., object], *args: object) -> None:
        """From the thread: call this in the loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._call_soon(what, *args)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self, within_s: float) -> None:
        """Let what was ordered be done, but wait no longer than that."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(within_s)


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

    threads = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
