"""The checksum of a long stream of bytes, computed by threads while the bytes are moved.

One core's sha256 is slower than a good disk, so a stream is hashed in separate blocks. The checksum

* of a file of at most one block is its sha256, as ``sha256sum`` prints it;
* of a longer file is the sha256 of the sha256s of its head (the header of a safetensors file, with
  the eight bytes before it) and of each block of 4 MiB after it; the last block may be shorter.

The head is separate so that files with equal data under different headers have equal block hashes:
a replica's digest costs nothing where its file is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Self

from worker_hooks.contract.atomic_file import open_regular

BLOCK = 4 << 20  # bytes
_THREADS = 4  # more would be faster than a disk
_AHEAD = 5  # blocks in memory that wait for their hash

Bytes = bytes | bytearray | memoryview


class Blocks:
    """The sha256 of each block of a stream, in a ``with``; the threads end with it.

    It holds the bytes until they are hashed: 24 MiB at most.
    """

    def __init__(self, sink: Callable[[list[memoryview]], None] | None = None) -> None:
        """Begin.

        ``sink``: called with each block, a list of its pieces, by the thread that adds.
        """
        self.nbytes = 0  # of the stream so far
        self._sink = sink
        self._pieces: list[memoryview] = []  # of the block that is not full yet
        self._size = 0
        self._count = 0
        self._hashes: dict[int, bytes] = {}
        self._jobs: SimpleQueue[tuple[int, list[memoryview]] | None] = SimpleQueue()
        self._room = Semaphore(_AHEAD)
        self._threads: list[Thread] = []  # started with the first full block

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    @property
    def pending(self) -> list[memoryview]:
        """What was added after the last full block."""
        return self._pieces

    def add(self, chunk: Bytes) -> None:
        """Continue the stream; the bytes must not change until the end.

        Raises:
            OSError: from the sink.
        """
        left = memoryview(chunk)
        self.nbytes += len(left)
        while left:
            piece = left[: BLOCK - self._size]
            self._pieces.append(piece)
            self._size += len(piece)
            left = left[len(piece) :]
            if self._size == BLOCK:
                self.flush()

    def flush(self) -> None:
        """End the block; only the last one of the stream may be short.

        Raises:
            OSError: from the sink.
        """
        if self._pieces:
            if self._size == BLOCK and self._count == 0:
                self._start()
            pieces, self._pieces, self._size = self._pieces, [], 0
            if self._threads:
                self._room.acquire()
                self._jobs.put((self._count, pieces))
            else:
                self._hashes[self._count] = sha256(pieces)
            self._count += 1
            if self._sink is not None:
                self._sink(pieces)

    def hashes(self) -> bytes:
        """The hashes of all blocks so far, including a last one that is not full, concatenated."""
        for _ in range(_AHEAD):
            self._room.acquire()
        for _ in range(_AHEAD):
            self._room.release()
        whole = b"".join(self._hashes[number] for number in range(self._count))
        return whole + (sha256(self._pieces) if self._pieces else b"")

    def _start(self) -> None:
        cores = len(os.sched_getaffinity(0))
        for _ in range(min(_THREADS, cores)):
            thread = Thread(target=self._work, name="msrun-hash", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread is left, or the interpreter is about to end
                return
            self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            number, pieces = job
            try:
                self._hashes[number] = sha256(pieces)
            finally:
                del job, pieces  # free the bytes before waiting for the next block
                self._room.release()


def sha256(pieces: list[memoryview]) -> bytes:
    """The hash of the concatenated pieces."""
    import hashlib  # loads OpenSSL, which msrun's start does not need

    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def of_file(path: Path, advance: Callable[[int], None]) -> str:
    """The checksum of a file, in hexadecimal digits.

    ``advance``: called with the number of bytes read since the last call.

    Raises:
        OSError: it cannot be read.
    """
    import hashlib

    with open(open_regular(path), "rb", buffering=0) as file, Blocks() as blocks:
        size = os.fstat(file.fileno()).st_size
        if size <= BLOCK:
            content = file.read()
            advance(len(content))
            return sha256([memoryview(content)]).hex()
        count = file.read(8)
        head = min(size, 8 + int.from_bytes(count, "little"))
        advance(len(count))
        digest = hashlib.sha256(count)
        left = head - len(count)
        while left and (chunk := file.read(min(left, BLOCK))):
            digest.update(chunk)
            left -= len(chunk)
            advance(len(chunk))
        while chunk := file.read(BLOCK):
            blocks.add(chunk)
            advance(len(chunk))
        return combined(digest.digest(), blocks.hashes())


def combined(head: bytes, blocks: bytes) -> str:
    """The checksum of a file longer than a block, from the hashes of its parts."""
    return sha256([memoryview(head), memoryview(blocks)]).hex()
