"""A thread for file work that may take long or never return: one job after the other.

It is a daemon thread: a disk that no longer answers cannot keep the agent from exiting.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TypeVar

from agent.machine.loop_calls import CallSoon, until_closed

T = TypeVar("T")

THREADS = 8  # more do not make a disk faster


class FileThread:
    """The thread; it is started with the first job."""

    def __init__(self, call_soon: CallSoon) -> None:
        self.tell = until_closed(call_soon)
        """Let the loop call something; called in the thread."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._earlier: list[threading.Thread] = []  # they finish the jobs of their own queues

    def do(self, job: Callable[[], T], done: Callable[[T | Exception], object]) -> None:
        """Do ``job`` in the thread; the loop calls ``done`` with its result or exception."""

        def work() -> None:
            try:
                result: T | Exception = job()
            except Exception as error:  # noqa: BLE001  the loop must learn of it, whatever it is
                result = error
            self.tell(done, result)

        self._jobs.put(work)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=_work, args=(self._jobs,), name="msrun-files", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread is left for this user: do the work here, the loop waits
            self._jobs.put(None)
            _work(self._jobs)
        else:
            self._thread = thread

    def continue_in_new_thread(self) -> None:
        """Let later jobs not wait for earlier ones, which may be stuck."""
        if self._thread is not None:
            self._jobs.put(None)
            self._earlier = [*filter(threading.Thread.is_alive, self._earlier), self._thread]
            self._jobs, self._thread = SimpleQueue(), None

    def close(self, within_s: float) -> None:
        """Wait until all jobs are done, but no longer than ``within_s``."""
        self.continue_in_new_thread()
        deadline = time.monotonic() + within_s
        for thread in self._earlier:
            thread.join(max(0.0, deadline - time.monotonic()))


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def side_by_side(do: Callable[[int], None], items: Iterable[int]) -> None:
    """Call ``do`` with each item in a few threads: others work while one waits for the disk.

    Raises:
        Exception: the first that was raised; items not yet begun are left out.
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
    with contextlib.suppress(RuntimeError):  # no thread is left for this user: this one works alone
        for _ in range(THREADS - 1):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
