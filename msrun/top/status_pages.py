"""The status pages of a running job, opened where its msrun holds them; nobody is asked.

``/proc/<pid>/fd`` of the user's own process names them. A page is mapped once and read for as long
as msrun holds it; a rank's next page takes its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from agent.machine.open_files import allow_files
from worker_hooks.contract.status_page import Heartbeat, Pace, Page

T = TypeVar("T")

LINK = "/memfd:msrun-page-"
_UNSOUND = (ValueError, TypeError, IndexError, RecursionError, struct.error)


class PageFacts(NamedTuple):
    """What a page says."""

    attempt: int
    beat: Heartbeat
    paces: tuple[Pace, ...]  # oldest first
    is_held: bool  # by msrun; else it is what a rank said last


class OpenPages:
    """The newest page of each rank; the last one for as long as there is no newer."""

    def __init__(self, pid: int) -> None:
        """``pid``: of the job's msrun."""
        self._fds = f"/proc/{pid}/fd"
        self._pages: dict[int, Page] = {}  # by inode
        self._held: frozenset[int] = frozenset()

    def look(self) -> Mapping[int, PageFacts]:
        """What each rank's page says now."""
        self._scan()
        found: dict[int, PageFacts] = {}
        for inode, page in self._pages.items():
            told = _sound(lambda page=page, inode=inode: _told(page, inode in self._held))  # type: ignore[misc]
            if told is not None and found.get(page.rank, told).attempt <= told.attempt:
                found[page.rank] = told
        return found

    def _scan(self) -> None:
        """Map what is new, let go of what msrun let go of and a newer page stands for."""
        held: dict[int, Page] = {}
        with contextlib.suppress(OSError):  # msrun is gone
            for path in self._links():
                with contextlib.suppress(OSError):  # closed this moment
                    inode = os.stat(path).st_ino
                    page = self._pages.get(inode) or held.get(inode) or _open(path)
                    if page is not None:
                        held[inode] = page
        ranks = {page.rank for page in held.values()}
        for inode, page in self._pages.items():
            if inode not in held and page.rank in ranks:
                page.close()
        left = {at: page for at, page in self._pages.items() if page.rank not in ranks}
        self._pages, self._held = {**left, **held}, frozenset(held)

    def _links(self) -> Iterator[str]:
        names = os.listdir(self._fds)
        allow_files(len(names))
        for name in names:
            path = f"{self._fds}/{name}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(LINK):
                    yield path

    def close(self) -> None:
        """Unmap them all."""
        for page in self._pages.values():
            page.close()
        self._pages = {}


def _open(path: str) -> Page | None:
    """A page, mapped; ``None``: it is not one of ours, or could be cut short under us."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # a page is only ever mapped whole; not written
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None
        return _sound(lambda: Page(fd))
    finally:
        os.close(fd)


def _told(page: Page, is_held: bool) -> PageFacts:
    return PageFacts(page.attempt, page.heartbeat(), tuple(page.paces()), is_held)


def _sound(read: Callable[[], T]) -> T | None:
    """A page is written by a worker: what cannot be read is as good as not there."""
    try:
        return read()
    except _UNSOUND:
        return None
