"""The status pages of a running job, opened through the descriptors of its msrun.

``/proc/<pid>/fd`` of the user's own process names them. A page is mapped once and read as long as
msrun holds it; a rank's next page replaces it.
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
    """The content of a page."""

    attempt: int
    beat: Heartbeat
    paces: tuple[Pace, ...]  # oldest first
    is_held: bool  # by msrun; else its process is gone


class OpenPages:
    """The newest page of each rank, also after msrun has closed it."""

    def __init__(self, pid: int) -> None:
        """``pid``: of the job's msrun."""
        self._fds = f"/proc/{pid}/fd"
        self._pages: dict[int, Page] = {}  # by inode
        self._held: frozenset[int] = frozenset()

    def look(self) -> Mapping[int, PageFacts]:
        """The content of each rank's page now."""
        self._scan()
        found: dict[int, PageFacts] = {}
        for inode, page in self._pages.items():
            facts = _sound(lambda page=page, inode=inode: _facts(page, inode in self._held))  # type: ignore[misc]
            if facts is not None and found.get(page.rank, facts).attempt <= facts.attempt:
                found[page.rank] = facts
        return found

    def _scan(self) -> None:
        """Map new pages; unmap those that msrun has closed and a newer page replaces."""
        held: dict[int, Page] = {}
        with contextlib.suppress(OSError):  # msrun is gone
            for path in self._links():
                with contextlib.suppress(OSError):  # it was closed just now
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
        """Unmap all pages."""
        for page in self._pages.values():
            page.close()
        self._pages = {}


def _open(path: str) -> Page | None:
    """A page, mapped; ``None``: it is not one of ours, or its owner could shrink it."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # `Page` maps it read-write; nothing is written
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None
        return _sound(lambda: Page(fd))
    finally:
        os.close(fd)


def _facts(page: Page, is_held: bool) -> PageFacts:
    return PageFacts(page.attempt, page.heartbeat(), tuple(page.paces()), is_held)


def _sound(read: Callable[[], T]) -> T | None:
    """What ``read`` returns; ``None``: a worker has written something unreadable."""
    try:
        return read()
    except _UNSOUND:
        return None
