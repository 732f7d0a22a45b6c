"""What a node leaves to ranks on other nodes, once no controller is there: pages of its dead ranks.

A node whose ranks live has copies of the pages of node 0 in their hands. If none lives, its msrun
leaves these as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from agent.hooks.page_copies import CopiedPages
from agent.hooks.status_pages import StatusPages
from agent.machine.file_thread import FileThread
from worker_hooks.contract.left_pages import leave_page, notes_folder


class OrphanedPages:
    """Writes them where those ranks look."""

    def __init__(self, job_id: str, pages: StatusPages, copies: CopiedPages) -> None:
        """Take the pages of this node's ranks, and its copies of those of node 0."""
        self._job_id = job_id
        self._pages = pages
        self._copies = copies

    def leave(
        self, ranks: Iterable[int], places: Mapping[int, str], files: FileThread, *, is_late: bool
    ) -> None:
        """Leave the pages of dead ranks.

        Others may not have been told yet that ranks are replaced: where a new one has no page yet,
        that of the dead one counts.

        Args:
            ranks: those.
            places: where each rank saves.
            files: does file work.
            is_late: ranks of other nodes may be done, and look no more.
        """
        found = {rank: page.content() for rank, page in self._pages.replaced().items()}
        for rank in sorted({*ranks} if is_late else {*ranks, *found}):
            content, place = self._pages.content(rank) or found.get(rank, b""), places.get(rank)
            if place:
                folder = notes_folder(place, self._job_id)
                write = partial(leave_page, folder, rank, content, is_late=is_late)
                files.do(write, lambda _: None)

    def leave_copies(self, places: Iterable[str], files: FileThread) -> None:
        """Leave what ranks of node 0 alone had."""
        for rank, content in self._copies.contents():
            for place in places:
                folder = notes_folder(place, self._job_id)
                write = partial(leave_page, folder, rank, content, is_copy=True)
                files.do(write, lambda _: None)
