"""Status pages on their way to another machine: without the gaps between what they hold.

Most of a page is room for what may be written to it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Callable

from worker_hooks.contract.status_page import Page

_SIZE = struct.Struct("<Q")  # of the page
_PART = struct.Struct("<QQ")  # where it is in the page, and its size
_MOST_BYTES = 1 << 40  # of a page: more is nonsense


def packed(page: Page) -> bytes:
    """All that a page holds."""
    parts = page.parts()
    return _SIZE.pack(page.memory[1]) + b"".join(
        _PART.pack(at, len(octets)) + octets for at, octets in parts
    )


def unpacked(octets: bytes) -> Page:
    """A copy in memory of this process alone, of which only what holds something takes room.

    Raises:
        ValueError: :func:`packed` made nothing like it.
        OSError: there is no memory.
    """
    return Page(_filled(octets, lambda size: mmap.mmap(-1, size)))


def unpacked_file(octets: bytes) -> int:
    """A copy in a file in memory, which other processes may map, too; its descriptor.

    Raises:
        ValueError: :func:`packed` made nothing like it.
        OSError: there is no memory, or no descriptor.
    """
    fd = os.memfd_create("msrun-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def mapped(size: int) -> mmap.mmap:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return mmap.mmap(fd, size)

    try:
        _filled(octets, mapped).close()
    except BaseException:
        os.close(fd)
        raise
    return fd


def _filled(octets: bytes, mapped: Callable[[int], mmap.mmap]) -> mmap.mmap:
    try:
        (size,) = _SIZE.unpack_from(octets)
        if not 0 < size <= _MOST_BYTES:
            raise ValueError(f"a page of {size} bytes")
        memory, at = mapped(size), _SIZE.size
        while at < len(octets):
            start, length = _PART.unpack_from(octets, at)
            at += _PART.size
            if start + length > size or at + length > len(octets):
                raise ValueError("a part is outside of the page")
            memory[start : start + length] = octets[at : at + length]
            at += length
    except struct.error as error:
        raise ValueError(f"not a packed page: {error}") from error
    return memory
