"""A checkpoint in memory on its way to the disk, as an ordinary dump. All of it is file work.

Nobody but the agent is needed for it. Called in the scribe's thread only, but for ``abandon``.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence

from agent.dump.disk import SavedDump
from agent.dump.memory import MemoryDump
from agent.dump.unfinished_folder import UnfinishedFolder
from agent.records.file_thread import side_by_side
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.storage import commit, safetensors_file
from worker_hooks.storage.manifest import DUMP_KIND, PRIVATE, Shard

_COUNT = 8  # bytes of a safetensors header's length
_BLOCK = 4 << 20  # bytes read at once


class MemoryFlush:
    """One memory checkpoint in one place, until it is complete or given up."""

    is_quick = False

    def __init__(self, memory: MemoryDump, layout: DumpLayout) -> None:
        """The memory may be closed meanwhile; this holds its files, until :meth:`write` ends.

        Raises:
            OSError: no descriptor is left.
        """
        assert memory.manifest is not None
        self.layout = layout
        self._manifest = memory.manifest
        self._files: list[tuple[Shard, int]] = []
        self._folder = UnfinishedFolder(layout)
        try:
            for shard in self._manifest.shards:
                self._files.append((shard, os.dup(int(shard.file))))
        except OSError:
            self._close()
            raise

    def write(self, advance: Callable[[int], None]) -> SavedDump:
        """Write every file with its checksum, then the manifest, and rename.

        Raises:
            OSError: the place cannot be written to.
            AbandonedError: it was given up.
        """

        def go_on(nbytes: int) -> None:
            self._folder.check()
            advance(nbytes)

        shards: dict[int, Shard] = {}

        def copy(at: int) -> None:
            shards[at] = self._copy(*self._files[at], go_on)

        try:
            self._folder.check()
            self._folder.begin()
            side_by_side(copy, range(len(self._files)))
            self._folder.check()
            about = self._manifest._replace(
                kind=DUMP_KIND,
                saved_at=time.time(),
                shards=tuple(shards.values()),
                digest="",  # what replicas in memory are compared by is no checksum
            )
            commit.commit(self.layout, about)
        finally:
            self._close()
        nbytes = sum(shard.nbytes for shard in about.shards)
        path = str(self.layout.folder)
        return SavedDump(path, nbytes, about.without_private, about.stale_private)

    def abandon(self) -> None:
        """As of :class:`UnfinishedFolder`."""
        self._folder.abandon()

    def remove(self) -> None:
        """As of :class:`UnfinishedFolder`."""
        self._folder.remove()

    def _copy(self, shard: Shard, file: int, advance: Callable[[int], None]) -> Shard:
        about = self._manifest
        name = DumpLayout.private(shard.rank)
        if shard.kind != PRIVATE:
            name = DumpLayout.shard(shard.rank, about.epoch + 1, about.batch)
        path = self.layout.unfinished / name
        path.parent.mkdir(exist_ok=True)
        size = int.from_bytes(os.pread(file, _COUNT, 0), "little")
        if size > shard.nbytes - _COUNT:
            raise OSError(errno.EIO, "it ends before its header does", f"/proc/self/fd/{file}")
        head = b"".join(_pieces(file, 0, _COUNT + size))
        done = safetensors_file.write(path, head, _pieces(file, len(head), shard.nbytes), advance)
        return shard._replace(file=name, sha256=done.sha256)

    def _close(self) -> None:
        files: Sequence[tuple[Shard, int]] = self._files
        self._files = []
        for _, file in files:
            os.close(file)


def _pieces(file: int, start: int, end: int) -> Iterator[bytes]:
    while start < end and (piece := os.pread(file, min(_BLOCK, end - start), start)):
        yield piece
        start += len(piece)
