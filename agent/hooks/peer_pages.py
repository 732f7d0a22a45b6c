"""The ranks of a node hold their peers' status pages, to save without msrun if it is killed."""

from __future__ import annotations

from collections.abc import Mapping

from agent.hooks.rank_links import Loop, RankLinks
from agent.hooks.status_pages import StatusPages
from worker_hooks.contract import protocol, wire

RESEND_S = 0.05  # until the kernel takes more descriptors


class SharedPages:
    """Hands out pages of ranks whose processes are on this node."""

    def __init__(self, links: RankLinks, pages: StatusPages, ranks: tuple[int, ...]) -> None:
        """Take the parts; ``ranks``: of this node."""
        self._links = links
        self._pages = pages
        self._ranks = ranks

    def share(self, attempt: int, loop: Loop) -> None:
        """Hand out those that peers lack, once all ranks of the attempt have one."""
        found = self._pages.take_unshared(self._ranks, attempt)
        if pages := {rank: found[rank] for rank in self._ranks if rank in found}:
            for rank in self._ranks:
                self._send(rank, pages, loop)

    def _send(self, rank: int, pages: Mapping[int, int], loop: Loop) -> None:
        """Send ``pages`` to a rank, once the kernel takes so many descriptors."""
        others = [
            other for other in pages if other != rank and self._pages.has(other, pages[other])
        ]
        for start in range(0, len(others), wire.MOST_FDS):
            part = others[start : start + wire.MOST_FDS]
            message = protocol.PeerPages(part, [self._links.pid(other) for other in part])
            if not self._links.send(rank, message, [pages[other] for other in part]):
                loop.call_later(RESEND_S, self._send, rank, pages, loop)
                return
