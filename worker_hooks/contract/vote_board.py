"""The vote board: which update each rank is ready for, in memory that all ranks of a node share.

Where ranks hold different parts of the state, a step is complete only if all of them make its
update. A rank that dies between two collectives of one backward leaves some peers with all their
gradients and others without: then nobody may begin. So each rank writes the step that it is ready
to update, and begins once all have. What is written outlives its rank, and is never taken back.

Layout, native numbers of eight bytes, each with a single writer::

    0     magic, count of ranks, the first step that needs all votes (0: none does)
    64    by rank: the newest step that it voted for
    ...   by rank: whether it casts no vote at present
"""

from __future__ import annotations

import fcntl
import mmap
import os

_MAGIC = 0x31455453564D  # "MVSTE1"
_MAGIC_AT, _COUNT_AT, _FIRST_AT = range(3)
_HEAD = 8  # words


class VoteBoard:
    """A board, mapped; the agent made it."""

    def __init__(self, fd: int) -> None:
        """Map it; the caller keeps ``fd``.

        Raises:
            ValueError: this is no board.
        """
        size = os.fstat(fd).st_size
        if size < _HEAD * 8:
            raise ValueError("not a vote board")
        self._map = mmap.mmap(fd, size)
        words = memoryview(self._map).cast("Q")
        count = words[_COUNT_AT]
        if words[_MAGIC_AT] != _MAGIC or len(words) < _HEAD + 2 * count:
            raise ValueError("not a vote board")
        self._words = words
        self._votes = words[_HEAD : _HEAD + count]
        self._shut = words[_HEAD + count : _HEAD + 2 * count]

    def close(self) -> None:
        """Unmap it."""
        for each in (self._votes, self._shut, self._words):
            each.release()
        self._map.close()

    def begin(self, first: int) -> None:
        """From this step on an update needs all votes; 0: none does any more."""
        self._words[_FIRST_AT] = first

    def is_needed(self, step: int) -> bool:
        """Whether the update of this step needs all votes."""
        return 0 < self._words[_FIRST_AT] <= step

    def vote(self, rank: int, step: int) -> None:
        """The rank is ready to update."""
        self._votes[rank] = step

    def has_all(self, step: int) -> bool:
        """Whether all ranks were ready; 0.3 us for 8 of them."""
        return min(self._votes) >= step

    def lacking(self, step: int) -> list[int]:
        """The ranks that have not voted for this step."""
        return [rank for rank, vote in enumerate(self._votes) if vote < step]

    def shut(self, rank: int, *, is_shut: bool) -> None:
        """Say whether this rank casts no vote until it says otherwise."""
        self._shut[rank] = is_shut

    def is_shut(self, rank: int) -> bool:
        """Whether it casts no vote at present."""
        return bool(self._shut[rank])


def create(count: int) -> int:
    """Make a board for so many ranks in anonymous shared memory; return its file descriptor.

    Raises:
        OSError: no memory or no descriptor is left.
    """
    fd = os.memfd_create("msrun-votes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, (_HEAD + 2 * count) * 8)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with mmap.mmap(fd, 0) as memory, memoryview(memory).cast("Q") as words:
            words[_COUNT_AT], words[_MAGIC_AT] = count, _MAGIC
    except BaseException:
        os.close(fd)
        raise
    return fd
