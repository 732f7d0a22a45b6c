"""Reads the parts of a tensor from files into its memory, by several threads if it is large.

A thread copies from a file in memory at 5 GB/s, half of that into memory that has no pages yet, and
a rank that is awaited by all others has the cores of its peers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from threading import Lock, Thread
from typing import NamedTuple

from worker_hooks.machine.new_memory import take_pages
from worker_hooks.storage.tensor_parts import Run

PART = 16 << 20  # bytes; what a thread reads at once, a multiple of large pages
FROM = 2 * PART  # bytes; for less no thread is started
THREADS = 4  # more are hardly faster than memory


class _Read(NamedTuple):
    """Consecutive bytes of a file."""

    file: FileIO
    start: int  # in the file
    at: int  # in memory
    end: int


def read_into(memory: memoryview, address: int, runs: Iterable[Run], *, is_new: bool) -> int:
    """Fill memory by parts of files.

    ``runs``: where its bytes are, in order. ``is_new``: nothing has used the memory before.

    Returns:
        How many bytes there were.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file ends too early, or there are more bytes than there is memory.
    """
    with ExitStack() as opened:
        reads = _Reads(_batches(memory, address, runs, opened), memory, address if is_new else 0)
        threads = min(THREADS, len(os.sched_getaffinity(0))) if len(memory) >= FROM else 1
        reads.by_threads(threads)
        return reads.nbytes


def _batches(
    memory: memoryview, address: int, runs: Iterable[Run], opened: ExitStack
) -> Iterator[list[_Read]]:
    """The reads of one part of the memory after the other; cut where large pages may begin."""
    files: dict[Path, FileIO] = {}
    batch: list[_Read] = []
    at, border = 0, PART - address % PART
    for path, start, nbytes in runs:
        file = files.get(path)
        if file is None:
            file = FileIO(path)
            files[path] = opened.enter_context(file)
        first, end = at, at + nbytes
        if end > len(memory):
            raise ValueError(f"{path} has more than fits")
        while at < end:
            stop = min(end, border)
            batch.append(_Read(file, start + at - first, at, stop))
            at = stop
            if at == border:
                yield batch
                batch, border = [], border + PART
    if batch:
        yield batch


class _Reads:
    """The reads of one tensor, shared by threads."""

    def __init__(
        self, batches: Iterator[list[_Read]], memory: memoryview, new_address: int
    ) -> None:
        self.nbytes = 0
        self._batches = batches
        self._memory = memory
        self._new_address = new_address  # 0: its pages are there
        self._lock = Lock()
        self._failure: BaseException | None = None

    def by_threads(self, count: int) -> None:
        """Read all, by this thread and others."""
        started = list[Thread]()
        with suppress(RuntimeError):  # no thread is left
            for _ in range(1, count):
                thread = Thread(target=self._work, name="msrun-read", daemon=True)
                thread.start()
                started.append(thread)
        self._work()
        for thread in started:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while self._failure is None:
                with self._lock:
                    batch = next(self._batches, None)
                if batch is None:
                    return
                self._read(batch)
        except BaseException as error:  # noqa: BLE001  raised where all of it was ordered
            self._failure = error

    def _read(self, batch: list[_Read]) -> None:
        first, last = batch[0].at, batch[-1].end
        if self._new_address:
            take_pages(self._new_address + first, last - first)
        for file, start, at, end in batch:
            place = at
            while place < end:
                count = os.preadv(file.fileno(), [self._memory[place:end]], start + place - at)
                if not count:
                    raise ValueError(f"{file.name} ends too early")
                place += count
        with self._lock:
            self.nbytes += last - first
