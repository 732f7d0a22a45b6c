"""Status pages on their way to another machine: without the gaps between what they hold.

Most of a page is room for what may be written to it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from bisect import bisect_right, insort
from collections.abc import Iterable

from worker_hooks.contract.status_page import BEGIN, Page

_SIZE = struct.Struct("<Q")  # of the page
_PART = struct.Struct("<QQ")  # where it is in the page, and its size
MOST_ALIKE = 16 << 10  # bytes of a part that may be another one's, too
MOST_KNOWN = 128  # such parts
_ENDS = 64  # bytes
MOST_ZEROS = 1 << 20  # that are read at once: more where nothing was written is nonsense
_MOST_BYTES = 1 << 40  # of a page: more is nonsense


class SparseMemory:
    """Bytes by slices, as of a ``mmap``; only what was written takes room, what is alike once.

    The kernel gives memory by 4 KiB: of thousands of ranks, each of which writes a little here and
    there, that is several times what they write.
    """

    __slots__ = ("_begin", "_held", "_parts", "_size", "_starts")

    def __init__(self, size: int, begin: int) -> None:
        """So many bytes; the first ``begin`` are written often, by small parts."""
        self._size = size
        self._begin = bytearray(min(begin, size))
        self._starts: list[int] = []  # of the parts behind it, which do not overlap
        self._parts: dict[int, bytes] = {}
        self._held = 0  # bytes of these

    @classmethod
    def of(cls, size: int, begin: int, parts: Iterable[tuple[int, bytes]]) -> SparseMemory:
        """With these parts, all within."""
        memory = cls(size, begin)
        memory.fill(parts)
        return memory

    def fill(self, parts: Iterable[tuple[int, bytes]]) -> None:
        """Write parts where nothing is written yet: one by one they take three times as long."""
        begin = end = len(self._begin)
        for start, octets in parts:
            stop = start + len(octets)
            if stop <= begin:
                self._begin[start:stop] = octets
            elif start < end:  # as :func:`packed` does not have them
                self[start:stop] = octets
                end = self._size
            else:
                self._starts.append(start)
                self._parts[start] = _alike(octets) if len(octets) <= MOST_ALIKE else octets
                self._held += len(octets)
                end = stop

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, where: slice) -> bytes:
        """Bytes, in new memory or unchangeable.

        Raises:
            ValueError: nobody has written most of them.
        """
        start, stop, _ = where.indices(self._size)
        begin = len(self._begin)
        if stop <= begin:
            return bytes(self._begin[start:stop])
        at = bisect_right(self._starts, start) - 1
        if at >= 0:  # all of it lies in one part, as nearly always
            first = self._starts[at]
            part = self._parts[first]
            if stop <= first + len(part):
                return part[start - first : stop - first]
        if stop - start > self._held + begin + MOST_ZEROS:
            raise ValueError(f"{stop - start} bytes of which most were never written")
        found = bytearray(max(0, stop - start))
        if start < begin:
            found[: begin - start] = self._begin[start:]
        for first in self._within(start, stop):
            part = self._parts[first]
            a, b = max(first, start), min(first + len(part), stop)
            found[a - start : b - start] = part[a - first : b - first]
        return bytes(found)

    def __setitem__(self, where: slice, octets: bytes) -> None:
        """Write bytes.

        Raises:
            ValueError: they are more or fewer than there is room for.
        """
        start, stop, _ = where.indices(self._size)
        if max(0, stop - start) != len(octets):
            raise ValueError(f"{len(octets)} bytes where there is room for {stop - start}")
        begin = len(self._begin)
        if stop <= begin:  # as each heartbeat
            self._begin[start:stop] = octets
            return
        if start < begin:
            self._begin[start:begin] = octets[: begin - start]
            octets, start = octets[begin - start :], begin
        if not octets:
            return
        octets = _alike(bytes(octets)) if len(octets) <= MOST_ALIKE else bytes(octets)
        if len(self._parts.get(start, b"")) == len(octets):  # as nearly always
            self._parts[start] = octets
            return
        last = self._starts[-1] if self._starts else -1
        is_behind = last < 0 or start >= last + len(self._parts[last])  # as they come in a page
        before = [] if is_behind else self._within(start, stop)
        if before:
            first, last = before[0], before[-1]
            low, high = min(start, first), max(stop, last + len(self._parts[last]))
            whole = bytearray(self[low:high])
            whole[start - low : stop - low] = octets
            start, octets = low, bytes(whole)
        for first in before:
            self._held -= len(self._parts.pop(first))
            self._starts.remove(first)
        self._held += len(octets)
        self._parts[start] = octets
        insort(self._starts, start)

    def _within(self, start: int, stop: int) -> list[int]:
        """Where those parts begin of which some lies there."""
        at = max(0, bisect_right(self._starts, start) - 1)
        found = []
        for first in self._starts[at:]:
            if first >= stop:
                break
            if first + len(self._parts[first]) > start:
                found.append(first)
        return found


_known: dict[bytes, bytes] = {}


def _alike(octets: bytes) -> bytes:
    """The bytes that were there before, if these are the same.

    They are looked up by both ends: a hash of all takes ten times as long as to compare them.
    """
    ends = octets[:_ENDS] + octets[-_ENDS:]
    known = _known.get(ends)
    if known == octets:
        return known
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _known[ends] = octets
    return octets


def packed(page: Page) -> bytes:
    """All that a page holds."""
    parts = page.parts()
    return _SIZE.pack(page.size) + b"".join(
        _PART.pack(at, len(octets)) + octets for at, octets in parts
    )


def unpacked(octets: bytes) -> Page:
    """A copy in memory of this process alone, of which only what holds something takes room.

    Raises:
        ValueError: :func:`packed` made nothing like it.
        OSError: there is no memory.
    """
    return Page(SparseMemory.of(_size_of(octets), BEGIN, _parts_of(octets)))


def unpacked_file(octets: bytes) -> int:
    """A copy in a file in memory, which other processes may map, too; its descriptor.

    Raises:
        ValueError: :func:`packed` made nothing like it.
        OSError: there is no memory, or no descriptor.
    """
    fd = os.memfd_create("msrun-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    try:
        size = _size_of(octets)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with mmap.mmap(fd, size) as memory:
            for start, part in _parts_of(octets):
                memory[start : start + len(part)] = part
    except BaseException:
        os.close(fd)
        raise
    return fd


def _size_of(octets: bytes) -> int:
    if len(octets) < _SIZE.size:
        raise ValueError(f"a packed page of {len(octets)} bytes")
    (size,) = _SIZE.unpack_from(octets)
    if not 0 < size <= _MOST_BYTES:
        raise ValueError(f"a page of {size} bytes")
    return int(size)


def _parts_of(octets: bytes) -> list[tuple[int, bytes]]:
    """Where each part is, and its bytes; all are within the page."""
    size, at, end = _size_of(octets), _SIZE.size, len(octets)
    found = []
    while at < end:
        first = at + _PART.size
        if first > end:
            raise ValueError("a part is cut short")
        start, length = _PART.unpack_from(octets, at)
        at = first + length
        if start + length > size or at > end:
            raise ValueError("a part is outside of the page")
        found.append((start, octets[first:at]))
    return found
