"""A dump in the agent's memory: no disk is touched.

Its files have no names. Every process of the user finds them as ``/proc/<agent's pid>/fd/<n>``: one
for each writer, one for the private states of all ranks, and the manifest. They outlive every rank.
A small dump is done in the agent's loop, a large one in the file thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterable

from agent.dump.room import shortage
from agent.dump.target import AbandonedError, Advance
from worker_hooks.contract.layout import held
from worker_hooks.contract.protocol import Written
from worker_hooks.machine.free_memory import free_bytes
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.checksum import Bytes
from worker_hooks.storage.manifest import MEMORY_KIND, REPLICATED, Manifest, Shard
from worker_hooks.storage.memory_dump import head_size

SMALL = 4 << 20  # bytes of private state that are copied before a thread would have begun
_FROZEN = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MemoryTarget:
    """The files of one dump, until they are closed; the methods are those of
    :class:`~agent.dump.target.Target`.
    """

    name = "the agent's memory"
    kind = MEMORY_KIND

    def __init__(self, step: int, private_nbytes: int, needed_nbytes: int) -> None:
        """Nothing is taken yet.

        Args:
            step: in the files' names, which people may see in ``/proc``.
            private_nbytes: how much the agent itself will write.
            needed_nbytes: how much must be free for the dump and for what is done with it.
        """
        self.is_inline = private_nbytes <= SMALL
        self._step = step
        self._needed_nbytes = needed_nbytes
        self._files: list[int] = []
        self._private: int | None = None  # the file of all private states
        self._written: dict[tuple[int, int], int] = {}  # rank, share -> file of the newest order
        self._cut: set[int] = set()  # files that may have no more than their header
        self._absent: set[int] = set()
        self._is_committed = False
        self._is_abandoned = False
        self._closing = threading.Lock()  # held while a thread writes

    @property
    def is_complete(self) -> bool:
        """An abandoned dump in memory is emptied, even a complete one."""
        return self._is_committed and not self._is_abandoned

    def begin(self) -> None:
        """Find out whether there is room: the kernel would kill ranks to make some."""
        if why := shortage(self._needed_nbytes, free_bytes()):
            raise OSError(errno.ENOMEM, why)

    def place_of(self, rank: int, share: int = 0) -> str:
        """A new file for a writer; the file of an earlier order must not be written any more."""
        file = self._open(f"rank-{rank}")
        if (before := self._written.get((rank, share))) is not None:
            _empty(before)
        self._written[rank, share] = file
        return held(file)

    @property
    def absent(self) -> tuple[int, ...]:
        """The states whose tensors stay in the memory of other nodes."""
        return tuple(sorted(self._absent))

    def take(self, path: str, file: int, *, is_cut: bool = False) -> bool:
        """A file has come in the place of one that a rank of another node was to write.

        Args:
            path: as :meth:`place_of` told it.
            file: the descriptor, which is this object's if it takes it.
            is_cut: it may have come without its tensors.

        Returns:
            Whether it does: not if the dump is abandoned, or the rank has a newer order.
        """
        with self._closing:
            owners = [owner for owner, before in self._written.items() if held(before) == path]
            if self._is_abandoned or not owners:
                return False
            self._files.append(file)
            self._written[owners[0]] = file
            if is_cut:
                self._cut.add(file)
            return True

    def write(self, shard: Shard, head: bytes, chunks: Iterable[Bytes], advance: Advance) -> Shard:
        """Write a private state without a checksum: only a defect of the memory can change it."""
        with self._closing:
            self._check()
            if self._private is None:
                self._private = self._open("private")
            file, at = self._private, os.lseek(self._private, 0, os.SEEK_CUR)
            nbytes = _write(file, [head, *chunks])
        advance(nbytes)
        return shard._replace(file=str(file), nbytes=nbytes, at=at)

    def accept(self, written: Written, variant: int) -> Shard:
        """Look at the size only."""
        with self._closing:
            self._check()
            file = self._written[written.rank, written.share]
            nbytes = os.fstat(file).st_size
            if file in self._cut and nbytes == head_size(file, 0) < written.nbytes:
                self._absent.add(variant)
                nbytes = written.nbytes
        if nbytes != written.nbytes:
            raise OSError(errno.EIO, f"{nbytes} bytes instead of {written.nbytes}", held(file))
        return Shard(str(file), written.rank, REPLICATED, nbytes, "", variant)

    def commit(self, manifest: Manifest) -> str:
        """Seal every file; the path is the manifest's."""
        with self._closing:
            self._check()
            file = self._open("manifest")
            _write(file, [manifests.encode(manifest, is_for_people=False)])
            for each in {file, *(int(shard.file) for shard in manifest.shards)}:
                fcntl.fcntl(each, fcntl.F_ADD_SEALS, _FROZEN)  # readers may map it
                with contextlib.suppress(OSError):  # its writer still maps it
                    fcntl.fcntl(each, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            self._is_committed = True
        return held(file)

    def abandon(self) -> None:
        """Let nothing more be written."""
        self._is_abandoned = True

    def remove(self) -> None:
        """Give the memory back. Files stay open: a rank that knows their numbers may be late."""
        with self._closing:
            for file in self._files:
                with contextlib.suppress(OSError):  # complete already: it is closed soon
                    _empty(file)

    def close(self) -> None:
        """Close every file: no rank will look for it by its number any more."""
        self._is_abandoned = True
        with self._closing:
            files, self._files = self._files, []
            for file in files:
                os.close(file)

    def _check(self) -> None:
        if self._is_abandoned:
            raise AbandonedError

    def _open(self, name: str) -> int:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        file = os.memfd_create(f"msrun-memory-{self._step}-{name}", flags)
        self._files.append(file)
        return file


def _empty(file: int) -> None:
    os.ftruncate(file, 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _FROZEN)


def _write(file: int, pieces: Iterable[Bytes]) -> int:
    """Write all of it; how many bytes."""
    left = [memoryview(piece) for piece in pieces if piece]
    nbytes = sum(map(len, left))
    while left:
        count = os.writev(file, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return nbytes
