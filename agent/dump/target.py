"""Where a dump is written: what a folder, the agent's memory and later places have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from worker_hooks.contract.protocol import Written
from worker_hooks.storage.checksum import Bytes
from worker_hooks.storage.manifest import Manifest, Shard

Advance = Callable[[int], None]
"""Called with the number of bytes that were written since the last call."""


Spread = Callable[[int, str, Manifest, Callable[[str], None]], None]
"""Copies a checkpoint in memory to other nodes: its dump's id, its path, its manifest, and what
takes the reason why that failed, or an empty text."""

Gather = Callable[[int, int, Manifest, str, Callable[[tuple[Shard, ...] | Exception], None]], None]
"""Has other nodes write what their ranks have copied: a dump's id, the number of the set of files,
the manifest of these files alone, the folder, and what takes what is written, or why it is not."""


class LostStateError(Exception):
    """What a rank has copied, or left, is not to be had any more."""


class AbandonedError(Exception):
    """The dump was abandoned before it was complete."""

    def __init__(self) -> None:
        super().__init__("the dump was abandoned")


class SavedDump(NamedTuple):
    """A complete dump."""

    path: str
    nbytes: int
    without_private: tuple[int, ...]
    stale_private: tuple[int, ...]

    @staticmethod
    def at(path: str, manifest: Manifest) -> SavedDump:
        """The dump that ``manifest`` describes."""
        nbytes = sum(shard.nbytes for shard in manifest.shards)
        return SavedDump(path, nbytes, manifest.without_private, manifest.stale_private)


class Target(Protocol):
    """One place that receives one dump.

    ``begin``, ``write``, ``accept``, ``commit`` and ``remove`` do file work: the file thread calls
    them, or the loop if ``is_inline``. The loop calls the others.
    """

    @property
    def name(self) -> str:
        """The place as people know it."""

    @property
    def kind(self) -> str:
        """The kind of checkpoint that a manifest names here."""

    @property
    def absent(self) -> tuple[int, ...]:
        """The states whose tensors are not here, once all files were accepted."""

    @property
    def is_inline(self) -> bool:
        """Whether all file work is done sooner than a thread would begin it."""

    @property
    def is_complete(self) -> bool:
        """Whether the dump can be read here; a complete dump may outlive :meth:`abandon`."""

    def begin(self) -> None:
        """Make the place ready.

        Raises:
            OSError: nothing can be written here.
        """

    def place_of(self, rank: int, share: int = 0) -> str:
        """Where a rank writes its shard; a second call replaces the place of the first.

        ``share``: which of the parts that it holds.

        Raises:
            OSError: no descriptor is left.
        """

    def write(self, shard: Shard, head: bytes, chunks: Iterable[Bytes], advance: Advance) -> Shard:
        """Write one of the agent's own files.

        Args:
            shard: all but its size and checksum; the place may give it another name.
            chunks: the tensors' bytes.
            advance: called as the file grows.

        Raises:
            OSError: it cannot be written.
            AbandonedError: the dump was abandoned.
        """

    def accept(self, written: Written, variant: int) -> Shard:
        """The file that a rank says it has written here.

        Raises:
            OSError: it is not there, or not as long as the rank says.
            AbandonedError: the dump was abandoned.
        """

    def commit(self, manifest: Manifest) -> str:
        """Complete the dump; the path by which others read it.

        Raises:
            OSError: it cannot be completed.
            AbandonedError: the dump was abandoned.
        """

    def abandon(self) -> None:
        """Let nothing more be written."""

    def remove(self) -> None:
        """Remove what was written, unless the dump is complete; comes after :meth:`abandon`."""

    def close(self) -> None:
        """Free what the place holds: no rank will read or write here any more."""


Collect = Callable[[Manifest], Callable[[Target, Advance], tuple[Shard, ...]]]
"""By the manifest of a checkpoint in memory: file work that writes what of it is absent here to a
place, and is called with that, and with what it calls as that grows."""


Stays = Callable[[int, int], bool]
"""Whether what a rank writes to memory stays in the memory of its own node; takes the rank, and of
how many parts before this one it writes one."""


class OtherNodes(NamedTuple):
    """What they do for a dump."""

    stays: Stays
    spread: Spread
    gather: Gather
    collect: Collect
