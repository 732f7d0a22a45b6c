"""A checkpoint in memory that is the agent's: what a dump is, but no disk is touched.

Its files have no names. Every process of the user finds them as ``/proc/<agent's pid>/fd/<n>``: one
for each writer, one for each rank's private state, and the manifest. They outlive every rank. What
is small is done in the agent's loop; what is large in the scribe's thread, as a dump is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from agent.dump.disk import DumpOrder, SavedDump, describe
from agent.dump.unfinished_folder import AbandonedError
from agent.hooks.status_pages import record
from agent.records.file_thread import side_by_side
from worker_hooks.contract.layout import held
from worker_hooks.contract.protocol import Written
from worker_hooks.contract.status_page import Page
from worker_hooks.storage import commit
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import MEMORY_KIND, PRIVATE, REPLICATED, Manifest, Shard

SMALL = 4 << 20  # bytes of private state that are copied before a thread would have begun
_FROZEN = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MemoryDump:
    """The checkpoint of one step, until it is complete or given up; then until it is closed."""

    is_quick = True

    def __init__(self, step: int, ranks: Sequence[int], pages: Mapping[int, Page]) -> None:
        """``ranks``: everyone whose private state belongs into it; ``pages`` hold that state."""
        self.step = step
        self.position: tuple[int, int] | None = None  # epoch, from 1, and batch; once complete
        self.manifest: Manifest | None = None  # once it is complete
        self._ranks = ranks
        self._pages = pages
        self._private: list[Shard] = []
        self._stale: list[int] = []
        self._failure: OSError | AbandonedError | None = None
        self._files: list[int] = []
        self._written: dict[int, int] = {}  # rank -> the file of its newest order
        self._is_abandoned = False
        self._closing = threading.Lock()  # held while a thread writes
        entries = (entry.nbytes for page in pages.values() for entry in page.entries)
        self.private_nbytes = sum(entries)
        self.is_small = self.private_nbytes <= SMALL
        """Whether all of the agent's own part is done in a moment."""

    def place_of(self, rank: int) -> str:
        """A new file for a writer: what it was ordered before, is not to be written any more.

        Raises:
            OSError: no descriptor is left.
        """
        file = self._open(f"rank-{rank}")
        if (before := self._written.get(rank)) is not None:
            _empty(before)
        self._written[rank] = file
        return held(file)

    def write_private(self, advance: Callable[[int], None]) -> None:
        """Write every rank's private state, the dead ones' too, from their pages.

        Meanwhile the ranks write theirs; what goes wrong here is said at the commit.
        """
        try:
            if self.is_small:
                for rank in self._ranks:
                    self._write_private(rank, advance)
            else:
                side_by_side(lambda rank: self._write_private(rank, advance), self._ranks)
        except (OSError, AbandonedError) as error:
            self._failure = error.with_traceback(None)  # whose frames hold pages

    def _write_private(self, rank: int, advance: Callable[[int], None]) -> None:
        page = self._pages.get(rank)
        found = record(page, self.step)
        if page is None or found is None:
            return
        try:
            head = commit.private_head(page.entries, found)
        except (ValueError, TypeError, KeyError):
            return  # a page that describes itself wrongly is as good as none
        with self._closing:
            self._check()
            file = self._open(f"private-{rank}")
            nbytes = _write(file, [head, found.payload])
        advance(nbytes)
        self._private.append(Shard(str(file), rank, PRIVATE, nbytes, ""))
        if found.step != self.step:
            self._stale.append(rank)

    def commit(self, order: DumpOrder) -> SavedDump:
        """Complete it; its path is the manifest's, and nobody can change it any more.

        Raises:
            OSError: a shard is not as long as its writer said, or no descriptor is left.
            AbandonedError: it was given up.
        """
        if self._failure is not None:
            raise self._failure
        with self._closing:
            self._check()
            shards = (*self._private, *self._replicated(order))
            found = record(self._pages.get(order.variants[0][0]), self.step)
            self.position = None if found is None else (found.epoch + 1, found.batch)
            stale = tuple(sorted(self._stale))
            about = describe(MEMORY_KIND, self.step, order, shards, self._ranks, stale, found)
            file = self._open("manifest")
            _write(file, [manifests.encode(about)])
            for each in (file, *(int(shard.file) for shard in shards)):
                fcntl.fcntl(each, fcntl.F_ADD_SEALS, _FROZEN)  # readers may map it
                with contextlib.suppress(OSError):  # its writer still maps it
                    fcntl.fcntl(each, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        self.manifest = about
        self._pages = {}
        nbytes = sum(shard.nbytes for shard in shards)
        return SavedDump(held(file), nbytes, about.without_private, about.stale_private)

    def abandon(self) -> None:
        """Let nothing more be written; called in the loop, before :meth:`remove` is ordered."""
        self._is_abandoned = True

    def remove(self) -> None:
        """Give the memory back. Files stay open: a rank that was told their numbers may be late."""
        with self._closing:
            self._pages = {}
            for file in self._files:
                with contextlib.suppress(OSError):  # complete already: it is closed soon
                    _empty(file)

    def close(self) -> None:
        """Nobody needs it any more, and nobody will look for it by its files' numbers."""
        self._is_abandoned = True
        with self._closing:
            self._pages = {}
            files, self._files = self._files, []
            for file in files:
                os.close(file)

    def _check(self) -> None:
        if self._is_abandoned:
            raise AbandonedError

    def _open(self, name: str) -> int:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        file = os.memfd_create(f"msrun-memory-{self.step}-{name}", flags)
        self._files.append(file)
        return file

    def _replicated(self, order: DumpOrder) -> Iterator[Shard]:
        for variant, writers in enumerate(order.variants):
            for rank in writers:
                file, nbytes = self._written[rank], order.written[rank].nbytes
                _look_at(file, order.written[rank])
                yield Shard(str(file), rank, REPLICATED, nbytes, "", variant)


def _look_at(file: int, done: Written) -> None:
    nbytes = os.fstat(file).st_size
    if nbytes != done.nbytes:
        raise OSError(errno.EIO, f"{nbytes} bytes instead of {done.nbytes}", held(file))


def _empty(file: int) -> None:
    os.ftruncate(file, 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _FROZEN)


def _write(file: int, pieces: Sequence[bytes]) -> int:
    """Write all of it; how many bytes."""
    nbytes = sum(map(len, pieces))
    left = [memoryview(piece) for piece in pieces if piece]
    while left:
        count = os.writev(file, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return nbytes
