"""The clearance board: which updates the controller's node has cleared, in memory of each node.

In a job on several nodes an update begins once the controller's node has heard that every rank is
ready for it. What a rank alone holds has left its node before it says so. So no step is committed
anywhere of which a node that is lost would take such state along. Each node has a board of its own;
its msrun writes what it is told, and its ranks read that without a system call.

Layout, native numbers of eight bytes::

    0     magic
    8     the first step that needs a clearance (0: none does)        msrun writes it
    16    the first step whose clearance is a vote (0: none is)       msrun writes it
    24    the newest step that is cleared                             msrun writes it
    32    the newest step that ranks here began without a clearance   ranks write it
    40    how often that happened                                     ranks write it
    48    the newest step that a rank here waits for                  ranks write it
    56    so many seconds ranks wait for a line in doubt (0: none is) msrun writes it

A line is in doubt while the other machine's kernel answers nothing, or its msrun says nothing: that
node may be lost, and then an update that began without a clearance would be of a step that nobody
else knows of. So ranks wait on until it has answered, or is lost.
"""

from __future__ import annotations

import fcntl
import mmap
import os

_MAGIC = 0x31454C43534D  # "MSCLE1"
_MAGIC_AT, _FIRST_AT, _FIRST_VOTE_AT, _CLEARED_AT = range(4)
_WAIVED_AT, _MISSES_AT, _AWAITED_AT, _DOUBT_AT = range(4, 8)
_WORDS = 8
MOST_MISSES = 5  # then ranks wait no more
FORGIVEN = 64  # steps in time, after which those before count no more


class ClearanceBoard:
    """A board, mapped; msrun made it."""

    def __init__(self, fd: int) -> None:
        """Map it; the caller keeps ``fd``.

        Raises:
            ValueError: this is no board.
        """
        if os.fstat(fd).st_size != _WORDS * 8:
            raise ValueError("not a clearance board")
        self._map = mmap.mmap(fd, _WORDS * 8)
        self._words = memoryview(self._map).cast("Q")
        if self._words[_MAGIC_AT] != _MAGIC:
            self.close()
            raise ValueError("not a clearance board")

    def close(self) -> None:
        """Unmap it."""
        self._words.release()
        self._map.close()

    def begin(self, first: int, first_vote: int = 0) -> None:
        """From the first step on an update needs a clearance, which is a vote from the second on.

        0: none does any more; none is.
        """
        self._words[_FIRST_VOTE_AT] = first_vote
        self._words[_FIRST_AT] = first

    def is_needed(self, step: int) -> bool:
        """Whether the update of this step needs a clearance."""
        return 0 < self._words[_FIRST_AT] <= step and self._words[_MISSES_AT] < MOST_MISSES

    def is_vote(self, step: int) -> bool:
        """Whether a clearance of this step says that all gradients are there, on all ranks."""
        return self.is_needed(step) and 0 < self._words[_FIRST_VOTE_AT] <= step

    def clear(self, step: int) -> None:
        """Every rank is ready for the update of this step."""
        self._words[_CLEARED_AT] = step
        is_on = self._words[_MISSES_AT] < MOST_MISSES
        if is_on and step >= self._words[_WAIVED_AT] + FORGIVEN:
            self._words[_MISSES_AT] = 0  # what delayed those was a moment's trouble

    def is_cleared(self, step: int) -> bool:
        """Whether every rank was ready for it."""
        return self._words[_CLEARED_AT] >= step

    def is_waived(self, step: int) -> bool:
        """Whether a rank of this node has begun it without a clearance."""
        return self._words[_WAIVED_AT] >= step

    def waive(self, step: int) -> int:
        """The clearance did not come: ranks here begin without it. How often that happened."""
        if self._words[_WAIVED_AT] < step:
            self._words[_WAIVED_AT] = step
            self._words[_MISSES_AT] += 1
        return self._words[_MISSES_AT]

    def wait_for(self, step: int) -> None:
        """A rank of this node waits for the clearance of this step."""
        self._words[_AWAITED_AT] = max(step, self._words[_AWAITED_AT])

    @property
    def is_awaited(self) -> bool:
        """Whether ranks of this node wait for a clearance."""
        step = self._words[_AWAITED_AT]
        return self.is_needed(step) and not self.is_cleared(step) and not self.is_waived(step)

    def doubt(self, most_s: int) -> None:
        """A line between nodes is in doubt: no rank begins an update without meanwhile.

        ``most_s``: for so many seconds at most, as nobody may say that it is over; 0: none is.
        """
        self._words[_DOUBT_AT] = most_s

    @property
    def doubt_s(self) -> int:
        """For how many seconds at most ranks wait for a line in doubt; 0: none is."""
        return self._words[_DOUBT_AT]


def create() -> int:
    """Make a board in anonymous shared memory; return its file descriptor.

    Raises:
        OSError: no memory or no descriptor is left.
    """
    fd = os.memfd_create("msrun-clearance", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _WORDS * 8)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with mmap.mmap(fd, 0) as memory, memoryview(memory).cast("Q") as words:
            words[_MAGIC_AT] = _MAGIC
    except BaseException:
        os.close(fd)
        raise
    return fd
