"""What the workers of a loader say of their batches, in memory that outlives them.

A worker that is started again in a copy of its rank makes batches once more that an earlier one has
made. Both look at the same memory, as all of them are forked from one process: so a batch that is
not the same as the first time is noticed before anybody trains with it.
"""

from __future__ import annotations

import ctypes
import mmap
import struct

_NUMBER = struct.Struct("<q")
_DIGEST = struct.Struct("<I")
_SLOT_BYTES = 16  # the digest first: it counts once the batch's number stands behind it
_TEXT_BYTES = 240
REMEMBERED = 1024  # newest batches of each worker
_ROW = _NUMBER.size + _TEXT_BYTES + REMEMBERED * _SLOT_BYTES


class WorkerNotes:
    """A row for each worker of one iterator."""

    def __init__(self, workers: int) -> None:
        """Map the memory.

        Raises:
            OSError: there is none.
        """
        self._workers = workers
        self._memory = mmap.mmap(-1, workers * _ROW)

    @property
    def address(self) -> int:
        """Where it begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def is_other(self, worker: int, number: int, digest: int) -> bool:
        """Note a batch before it is handed out; whether there was another one of that number."""
        at = worker * _ROW + _NUMBER.size + _TEXT_BYTES + number % REMEMBERED * _SLOT_BYTES
        (known,) = _NUMBER.unpack_from(self._memory, at + 8)
        if known == number + 1:  # zeros are no number
            return bool(_DIGEST.unpack_from(self._memory, at)[0] != digest)
        _DIGEST.pack_into(self._memory, at, digest)
        _NUMBER.pack_into(self._memory, at + 8, number + 1)
        return False

    def tell_change(self, worker: int, what: str) -> None:
        """Say that something is not as it was when the worker began."""
        text = what.encode(errors="replace")[:_TEXT_BYTES]
        at = worker * _ROW + _NUMBER.size
        self._memory[at : at + len(text)] = text
        _NUMBER.pack_into(self._memory, worker * _ROW, len(text))

    def change(self) -> str:
        """What a worker has said; empty: nothing."""
        for row in range(0, self._workers * _ROW, _ROW):
            (size,) = _NUMBER.unpack_from(self._memory, row)
            if size:
                text = self._memory[row + _NUMBER.size : row + _NUMBER.size + size]
                return text.decode(errors="replace")
        return ""
