"""Memory that a process shares with others, which a copy shares, too: it must become its own.

A lock of ``multiprocessing``, such as that of a progress bar, is a semaphore in memory of its own.
A rank may die while it holds one; its copy would wait for ever. So semaphores are noted at the copy
and put back when it wakes. Only workers of a DataLoader use them meanwhile: one that a worker may
hold at the copy is refused. The batches that such workers have made lie in shared memory, too: a
copy gets them as memory of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import struct
from collections.abc import Collection
from typing import NamedTuple

_SEMAPHORE = "/dev/shm/sem."  # as the C library names them  # noqa: S108
_VALUE = struct.Struct("=I")  # it comes first in a semaphore
_OF_TORCH = re.compile(r"/dev/shm/torch_(\d+)_\d+_\d+ \(deleted\)")  # noqa: S108  who has made it
_PRIVATE, _FIXED, _ANONYMOUS = mmap.MAP_PRIVATE, 0x10, mmap.MAP_ANONYMOUS

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)

Contents = list[tuple[int, bytes]]  # by address


class Mapping(NamedTuple):
    """A part of the memory that the process may write and others see."""

    address: int
    nbytes: int
    path: str


def mappings() -> list[Mapping]:
    """All of this process."""
    with open("/proc/self/maps") as maps:
        rows = [line.split(maxsplit=5) for line in maps if " rw-s " in line]
    found = []
    for row in rows:
        begin, end = (int(word, 16) for word in row[0].split("-"))
        found.append(Mapping(begin, end - begin, row[-1].strip()))
    return found


def unknown(made_by: Collection[int] = (), known: Collection[int] = ()) -> tuple[str, ...]:
    """What cannot be put back, by the names of the files.

    Args:
        made_by: the processes whose batches become the copy's own.
        known: an address in each part that need not be as it was.
    """
    paths = (
        each.path
        for each in mappings()
        if not each.path.startswith(_SEMAPHORE)
        and not _is_batch(each, made_by)
        and not any(each.address <= address < each.address + each.nbytes for address in known)
    )
    return tuple(dict.fromkeys(paths))


def batches(made_by: Collection[int]) -> list[Mapping]:
    """What these processes have made and handed over; they do not write it any more."""
    return [each for each in mappings() if _is_batch(each, made_by)] if made_by else []


def locks() -> Contents:
    """The semaphores as they are now."""
    return contents([each for each in mappings() if each.path.startswith(_SEMAPHORE)])


def contents(of: Collection[Mapping]) -> Contents:
    """What memory holds now."""
    return [(each.address, ctypes.string_at(each.address, each.nbytes)) for each in of]


def taken(known: Contents, others: Collection[int]) -> bool:
    """Whether one of these semaphores is used up: somebody may hold it.

    ``others``: the addresses of those that do not matter.
    """
    return any(
        address not in others and not _VALUE.unpack_from(content)[0] for address, content in known
    )


def put_back(known: Contents) -> None:
    """Make memory as it was."""
    for address, content in known:
        ctypes.memmove(address, content, len(content))


def own(known: Contents) -> None:
    """In a copy: have memory of its own in place of memory that is shared, with this content.

    Raises:
        OSError: there is none.
    """
    wanted = mmap.PROT_READ | mmap.PROT_WRITE
    for address, content in known:
        flags = _PRIVATE | _FIXED | _ANONYMOUS
        if _libc.mmap(address, len(content), wanted, flags, -1, 0) != address:
            raise OSError(ctypes.get_errno(), "mmap")
    put_back(known)


def _is_batch(mapping: Mapping, made_by: Collection[int]) -> bool:
    found = _OF_TORCH.fullmatch(mapping.path)
    return found is not None and int(found[1]) in made_by
