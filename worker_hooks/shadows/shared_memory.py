"""Memory that a process shares with others, which a copy shares, too: only locks can be put back.

A lock of ``multiprocessing``, such as that of a progress bar, is a semaphore in memory of its own.
A rank may die while it holds one; its copy would wait for ever. So semaphores are noted at the copy
and put back when it wakes. A process that has children cannot be copied, so nobody else uses them.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

_SEMAPHORE = "/dev/shm/sem."  # as the C library names them  # noqa: S108


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


def unknown() -> tuple[str, ...]:
    """What cannot be put back, by the names of the files."""
    paths = (each.path for each in mappings() if not each.path.startswith(_SEMAPHORE))
    return tuple(dict.fromkeys(paths))


def locks() -> list[tuple[int, bytes]]:
    """The semaphores as they are now."""
    return [
        (each.address, ctypes.string_at(each.address, each.nbytes))
        for each in mappings()
        if each.path.startswith(_SEMAPHORE)
    ]


def put_back(known: list[tuple[int, bytes]]) -> None:
    """Make them as they were."""
    for address, content in known:
        ctypes.memmove(address, content, len(content))
