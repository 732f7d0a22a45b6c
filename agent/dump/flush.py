"""A dump on its way from the agent's memory to another place. All of it is file work.

Nobody but the agent is needed for it: the ranks that wrote the dump may be gone.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator

from agent.dump.target import Advance, SavedDump, Target
from agent.records.file_thread import side_by_side
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.storage.manifest import PRIVATE, Manifest, Shard

_COUNT = 8  # bytes of a safetensors header's length
_BLOCK = 4 << 20  # bytes read at once


class MemoryFlush:
    """One dump in memory, and the place it goes to."""

    def __init__(self, manifest: Manifest, target: Target) -> None:
        """Hold the files until :meth:`write` ends; the memory may be closed meanwhile.

        Raises:
            OSError: no descriptor is left.
        """
        self._manifest = manifest
        self._target = target
        self._files: list[int] = []
        try:
            for shard in manifest.shards:
                self._files.append(os.dup(int(shard.file)))
        except OSError:
            self._close()
            raise

    def write(self, advance: Advance) -> SavedDump:
        """Copy every file, then complete the dump.

        Raises:
            OSError: the place cannot be written to.
            AbandonedError: the dump was abandoned.
        """
        copied: dict[int, Shard] = {}

        def copy(at: int) -> None:
            copied[at] = self._copy(self._manifest.shards[at], self._files[at], advance)

        try:
            self._target.begin()
            side_by_side(copy, range(len(self._files)))
        finally:
            self._close()
        about = self._manifest._replace(
            kind=self._target.kind,
            saved_at=time.time(),
            shards=tuple(copied.values()),
            digest="",  # what replicas in memory are compared by is no checksum
        )
        return SavedDump.at(self._target.commit(about), about)

    def _copy(self, shard: Shard, file: int, advance: Advance) -> Shard:
        about = self._manifest
        name = DumpLayout.private(shard.rank)
        if shard.kind != PRIVATE:
            name = DumpLayout.shard(shard.rank, about.epoch + 1, about.batch)
        size = int.from_bytes(os.pread(file, _COUNT, 0), "little")
        if size > shard.nbytes - _COUNT:
            raise OSError(errno.EIO, "it ends before its header does", f"/proc/self/fd/{file}")
        head = b"".join(_pieces(file, 0, _COUNT + size))
        tensors = _pieces(file, len(head), shard.nbytes)
        return self._target.write(shard._replace(file=name), head, tensors, advance)

    def _close(self) -> None:
        files, self._files = self._files, []
        for file in files:
            os.close(file)


def _pieces(file: int, start: int, end: int) -> Iterator[bytes]:
    while start < end and (piece := os.pread(file, min(_BLOCK, end - start), start)):
        yield piece
        start += len(piece)
