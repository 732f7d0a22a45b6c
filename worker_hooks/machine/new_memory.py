"""Takes pages for new memory before something is read into it.

The kernel reads a file into memory that was never touched page by page: each is a fault of its own
within the read. Taking all of them at once, and large ones, halves the time. Measured for 1 GiB in
a file in memory: 0.9 s of processor time before, 0.5 s with both, 0.8 s with the first alone, and
1.7 s with large pages alone.

Not every machine has large pages at hand. One whose host takes free memory back gives small pages
from what was freed last, and large ones, after some, from what its host has yet to find: 1.5 to
2.7 s where small ones took 0.5. So of both sizes the one is taken that was cheaper last.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import time

FROM = 4 << 20  # bytes; less is not worth a call
PART = 8 << 20  # bytes; after so many it is seen what pages cost

_HUGE = 2 << 20  # bytes; the size of large pages where they are of use
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_POPULATE_WRITE = 14, 15, 23


_costs = {True: 0.0, False: 0.0}  # of large pages, and of small ones, last: seconds per byte


def take_pages(address: int, nbytes: int) -> None:
    """Take pages for memory whose content is of no use yet; an older kernel takes them later."""
    start, end = -(-address // _HUGE) * _HUGE, (address + nbytes) // _HUGE * _HUGE
    if nbytes < FROM or end <= start or not _is_supported():
        return
    while start < end:
        stop, began_s = min(start + PART, end), time.thread_time()
        is_large = _costs[True] <= _costs[False]
        _take(start, stop, is_large=is_large)
        _costs[is_large] = (time.thread_time() - began_s) / (stop - start)
        start = stop


def _take(start: int, end: int, *, is_large: bool) -> None:
    if is_large:
        _advise(start, end, _MADV_HUGEPAGE)
    if _advise(start, end, _MADV_POPULATE_WRITE) and is_large:
        _advise(start, end, _MADV_NOHUGEPAGE)


@functools.cache
def _is_supported() -> bool:
    """Whether the kernel takes pages on demand: from Linux 5.14 on."""
    with mmap.mmap(-1, mmap.PAGESIZE) as probe:
        place = ctypes.c_char.from_buffer(probe)
        address = ctypes.addressof(place)
        del place
        return _advise(address, address + mmap.PAGESIZE, _MADV_POPULATE_WRITE) == 0


def _advise(start: int, end: int, advice: int) -> int:
    madvise = _library().madvise
    return int(madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice))


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
