"""A dump in memory, held open: it stays readable, and can go to a disk, whoever dies meanwhile.

Its files have no names; the agent made them, and their numbers are in its manifest. The kernel
keeps a file as long as any process has it open.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from weakref import finalize

from worker_hooks.contract.layout import DumpLayout
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import PRIVATE, Manifest, Shard

HERE = Path("/proc/self/fd")
_COUNT = 8  # bytes of a safetensors header's length
_BLOCK = 4 << 20  # bytes read at once


class DiskFile(NamedTuple):
    """What one file of the dump is on a disk."""

    shard: Shard  # under its name there; not its checksum
    head: bytes
    tensors: Iterator[bytes]


class HeldDump:
    """The files of one dump in memory, as long as this object lives."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Open the files.

        ``folder``: in which the manifest's files are; their maker's, or :data:`HERE`.

        Raises:
            OSError: one does not exist any more, or no descriptor is left.
        """
        self._opened: list[int] = []
        finalize(self, _close_all, self._opened)
        here: dict[str, str] = {}  # the name of a file -> that of the same one here
        for shard in (*manifest.shards, *manifest.heads):
            if shard.file not in here:
                self._opened.append(os.open(folder / shard.file, os.O_RDONLY | os.O_CLOEXEC))
                here[shard.file] = str(self._opened[-1])
        self.inode = os.fstat(self._opened[0]).st_ino if self._opened else 0
        """Of the first of them, which no other file has as long as this one is open."""
        self.manifest = manifest._replace(
            shards=tuple(shard._replace(file=here[shard.file]) for shard in manifest.shards),
            heads=tuple(shard._replace(file=here[shard.file]) for shard in manifest.heads),
        )
        """With the numbers by which this process has the files open."""
        self._shares = _shares(manifest.shards)

    @staticmethod
    def at(path: str) -> HeldDump | None:
        """That of a manifest in memory; ``None``: it is not in memory, or not any more."""
        if not manifests.is_in_memory(Path(path)):
            return None
        try:
            return HeldDump(Path(path).parent, manifests.read(Path(path)))
        except (OSError, ValueError):
            return None

    def complete(self, absent: Iterable[int] = ()) -> None:
        """Tensors have come, but for those of the ``absent`` states."""
        self.manifest = self.manifest._replace(absent=tuple(absent))

    def file(self, number: int) -> DiskFile:
        """One of the files, in the manifest's order.

        Raises:
            OSError: it cannot be read.
        """
        about, shard = self.manifest, self.manifest.shards[number]
        file, at = int(shard.file), shard.at
        if shard.kind != PRIVATE and shard.variant in about.absent:
            raise OSError(errno.ENODATA, "its tensors are on another node", f"{HERE}/{file}")
        name = DumpLayout.private(shard.rank)
        if shard.kind != PRIVATE:
            name = DumpLayout.shard(shard.rank, about.epoch + 1, about.batch, self._shares[number])
        size = head_size(file, at)
        if size > shard.nbytes:
            raise OSError(errno.EIO, "it ends before its header does", f"{HERE}/{file}")
        head = b"".join(_pieces(file, at, at + size))
        tensors = _pieces(file, at + len(head), at + shard.nbytes)
        return DiskFile(shard._replace(file=name, at=0, is_early=False), head, tensors)

    def on_disk(self, kind: str, shards: Iterable[Shard]) -> Manifest:
        """The manifest of the same dump on a disk, where its files are ``shards``.

        A node may have got only what its own ranks need.
        """
        there, world = tuple(shards), range(self.manifest.world_size)
        private = {shard.rank for shard in there if shard.kind == PRIVATE}
        return self.manifest._replace(
            kind=kind,
            saved_at=time.time(),
            shards=there,
            without_private=tuple(rank for rank in world if rank not in private),
            digest="",  # what replicas in memory are compared by is no checksum
            absent=(),
            heads=(),
        )

    def close(self) -> None:
        """Close the files."""
        _close_all(self._opened)


def head_size(file: int, at: int) -> int:
    """How many bytes precede the tensors of a file in memory.

    Args:
        file: a descriptor.
        at: where it begins there.
    """
    return _COUNT + int.from_bytes(os.pread(file, _COUNT, at), "little")


def _shares(shards: Iterable[Shard]) -> list[int]:
    """Of each file, how many of its kind the same rank has written before: parts of the state."""
    written = Counter[tuple[int, str]]()
    found = []
    for shard in shards:
        found.append(written[shard.rank, shard.kind])
        written[shard.rank, shard.kind] += 1
    return found


def _close_all(opened: list[int]) -> None:
    while opened:
        os.close(opened.pop())


def _pieces(file: int, start: int, end: int) -> Iterator[bytes]:
    while start < end and (piece := os.pread(file, min(_BLOCK, end - start), start)):
        yield piece
        start += len(piece)
