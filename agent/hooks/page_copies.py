"""Copies of the status pages of node 0, which die with it, on the node that would take its part.

On node 0 what its ranks write is sent on; on the other node it is kept in memory that the ranks
there have open, so that they can save it when node 0 and their own msrun's orders are gone. What
the ranks have said that stays true goes there as well: a controller on that node has to know it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from agent.hooks.rank_links import Loop, RankLinks, Said
from agent.hooks.standing_words import StandingWords
from agent.hooks.status_pages import StatusPages
from agent.text.wording import sized
from worker_hooks.contract import protocol, wire
from worker_hooks.contract.packed_page import unpacked_file

if TYPE_CHECKING:  # a job of one node starts without them
    from agent.nodes.run_messages import PageNews, PageSeen, PagesTold, WordKept

    Copied = PageSeen | PageNews | PagesTold | WordKept
    Send = Callable[[Copied], None]

MOST_SHOWN = 12 << 20  # bytes of a page: what fits a frame, with room for the rest
RESEND_S = 0.05  # until the kernel takes more descriptors

LARGE = (
    "what rank {} alone holds (buffers, data position, variables) is too large to be kept on "
    "another node ({}): if node 0 dies, it begins anew"
)
TOO_LARGE = (
    "what rank {} alone holds (buffers, data position, variables) is too large to be kept on the "
    "controller's node ({}): if its node dies, or it dies itself, it begins there anew"
)


class PageCopies:
    """On node 0: has another node keep copies of the pages of its ranks."""

    def __init__(
        self,
        pages: StatusPages,
        ranks: tuple[int, ...],
        say: Callable[[str], None],
        kept: Callable[[PagesTold], None],
    ) -> None:
        """Take the parts.

        Args:
            pages: of all ranks.
            ranks: whose copies are kept: those that are lost with this node.
            say: prints one sentence for people.
            kept: takes what :meth:`confirm` was given, if no other node keeps copies.
        """
        self._pages = pages
        self._ranks = frozenset(ranks)
        self._say = say
        self._kept = kept
        self._told: PagesTold | None = None  # the newest that was to be confirmed
        self._send: Send | None = None
        self._large: set[int] = set()  # of which no copy is kept, which was said
        self._words = StandingWords()

    def begin(self, send: Send | None) -> None:
        """Another node keeps them from now on."""
        self._send = send
        for rank in sorted(self._ranks):
            for said in self._words.of(rank):
                self._pass_on(said)
            self.show(rank)
        if self._told is not None:  # the node before may not have answered
            self.confirm(self._told)

    def confirm(self, told: PagesTold) -> None:
        """Have the other node say when it has all that was sent before."""
        self._told = told
        if self._send is None:
            self._kept(told)
        else:
            self._send(told)

    def confirm_step(self, attempt: int, step: int) -> None:
        """The same of a step for whose update the ranks here are ready."""
        from agent.nodes.run_messages import PagesTold

        self.confirm(PagesTold(attempt, step))

    def hear(self, message: Said) -> None:
        """A rank has said something."""
        if message.rank in self._ranks and self._words.hear(message):
            self._pass_on(message)

    def forget(self) -> None:
        """All ranks are gone: what they have said is true no more."""
        self._words.clear()

    def _pass_on(self, message: Said) -> None:
        if self._send is not None:
            from agent.nodes.run_messages import WordKept, pack_said

            self._send(WordKept(pack_said(message)))

    def show(self, rank: int) -> None:
        """A rank has another page than before."""
        if self._send is None or rank not in self._ranks:
            return
        from agent.nodes.run_messages import PageSeen

        if not (page := self._pages.packed(rank)):
            return
        self._pages.news(rank)  # what the page has, and perhaps less
        if len(page) > MOST_SHOWN:
            if rank not in self._large:
                self._large.add(rank)
                self._say(LARGE.format(rank, sized(len(page))))
            return
        self._large.discard(rank)
        self._send(PageSeen.of(rank, self._pages.attempt(rank), page))

    def tell(self, rank: int) -> None:
        """A rank has written to its page."""
        if self._send is None or rank in self._large or rank not in self._ranks:
            return
        if self._pages.has_device_areas(rank):  # of those there is no news
            self.show(rank)
            return
        if pieces := self._pages.news(rank):
            from agent.nodes.run_messages import PageNews

            self._send(PageNews.of(rank, self._pages.attempt(rank), pieces))


class CopiedPages:
    """On that other node: keeps the copies, and hands them to its ranks."""

    def __init__(self, links: RankLinks, ranks: tuple[int, ...]) -> None:
        """Take the parts; ``ranks``: of this node."""
        self._links = links
        self._ranks = ranks
        self._pages = StatusPages()
        self._words = StandingWords()
        self._files: dict[int, int] = {}  # rank of node 0 -> a descriptor of its page
        self._lacking: dict[int, set[int]] = {}  # rank here -> those whose pages it was not sent
        self._ready: set[int] = set()  # ranks here that have registered: before, none is expected
        self._stale: set[int] = set()  # ranks here that have pages which are kept no more

    def take(self, message: PageSeen | PageNews | WordKept, loop: Loop) -> None:
        """Keep what was sent."""
        from agent.nodes.run_messages import PageNews, WordKept, unpack_said

        if isinstance(message, WordKept):
            said: Any = unpack_said(message.message)
            self._words.hear(said)
            return
        if isinstance(message, PageNews):
            self._pages.mirror_news(*message.read())
            return
        rank, attempt, octets = message.read()
        try:
            page = unpacked_file(octets)
            self._pages.keep(rank, attempt, page, is_copy=True)  # or closes it
            shared = os.dup(page)
        except (ValueError, OSError):
            return  # no memory, or no descriptor: then it is lost with node 0
        if (old := self._files.pop(rank, None)) is not None:
            os.close(old)
        self._files[rank] = shared
        for here in self._ranks:
            self._lacking.setdefault(here, set()).add(rank)
        self.share(loop)

    def told(self) -> Iterator[tuple[Said, bytes]]:
        """What the ranks there have said that stays true, with their pages, packed."""
        for rank in sorted(self._words.ranks):
            for said in self._words.of(rank):
                is_shown = isinstance(said, protocol.Registered)
                yield said, self._pages.packed(rank) if is_shown else b""

    def contents(self) -> Iterator[tuple[int, bytes]]:
        """The ranks there, and their pages as they are kept."""
        for rank in sorted(self._files):
            yield rank, self._pages.content(rank)

    def registered(self, here: int, loop: Loop) -> None:
        """A rank of this node takes pages from now on, all of them if it is a new process."""
        self._ready.add(here)
        self._lacking[here] = set(self._files)
        self.share(loop)

    def leave(self, loop: Loop) -> None:
        """They are kept on another node from now on: what stands still must not be saved."""
        self._close()
        self._stale |= self._ready
        self.share(loop)

    def share(self, loop: Loop) -> None:
        """Hand the pages to the ranks here that lack them."""
        for here in tuple(self._stale):
            if not self._links.send(here, protocol.PeerPages([], []), []):
                loop.call_later(RESEND_S, self.share, loop)
                return
            self._stale.discard(here)
        for here in self._ready:
            if lacking := self._lacking.get(here):
                self._send(here, sorted(lacking), loop)

    def clear(self) -> None:
        """Every rank is gone."""
        self._close()
        self._ready.clear()
        self._stale.clear()

    def drop(self, here: int) -> None:
        """A rank here has ended, another will register."""
        self._ready.discard(here)
        self._stale.discard(here)

    def _close(self) -> None:
        self._pages.clear()
        self._words.clear()
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._lacking.clear()

    def _send(self, here: int, ranks: list[int], loop: Loop) -> None:
        for start in range(0, len(ranks), wire.MOST_FDS):
            part = ranks[start : start + wire.MOST_FDS]
            message = protocol.PeerPages(part, [0] * len(part))
            if not self._links.send(here, message, [self._files[rank] for rank in part]):
                loop.call_later(RESEND_S, self.share, loop)
                return
            self._lacking[here] -= set(part)
