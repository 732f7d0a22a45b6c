"""What a rank knows of its peers if the agent dies: their processes, and their status pages.

The agent tells it while it lives. So whoever is left can write the private state of a rank that
died at the same moment, and sees whom to wait for.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from worker_hooks.contract.process_stat import ProcessStat, read_stat
from worker_hooks.contract.status_page import Page
from worker_hooks.storage.private_records import UNSOUND


class _Peer(NamedTuple):
    """One other rank."""

    pid: int
    born: int  # tells a reused pid
    page: int  # a descriptor

    def look(self) -> ProcessStat | None:
        """Its process; ``None``: it has ended."""
        found = read_stat(self.pid)
        is_there = found is not None and found.born == self.born and not found.is_dead
        return found if is_there else None


class KnownPeers:
    """The other ranks of the job, as the agent knew them."""

    def __init__(self) -> None:
        """None yet."""
        self._known: dict[int, _Peer] = {}
        self._copies: dict[int, int] = {}  # of pages on another node: rank -> a descriptor

    def learn(self, ranks: Sequence[int], pids: Sequence[int], pages: Sequence[int]) -> None:
        """Take in what the agent told; the pages' descriptors belong to this object then.

        Without ranks: copies of pages on other nodes are not kept here any more.
        """
        if not ranks:
            self._forget_copies()
        for rank, pid, page in zip(ranks, pids, pages, strict=False):  # descriptors may run out
            if not pid:
                if (copy := self._copies.pop(rank, None)) is not None:
                    os.close(copy)
                self._copies[rank] = page
                continue
            if (old := self._known.pop(rank, None)) is not None:
                os.close(old.page)
            found = read_stat(pid)
            self._known[rank] = _Peer(pid, 0 if found is None else found.born, page)

    def awake(self) -> set[int]:
        """The peers whose processes exist and are not stopped."""
        looks = {rank: peer.look() for rank, peer in self._known.items()}
        return {rank for rank, one in looks.items() if one is not None and not one.is_stopped}

    def stopped(self) -> set[int]:
        """The peers that a signal or a debugger has stopped."""
        looks = {rank: peer.look() for rank, peer in self._known.items()}
        return {rank for rank, one in looks.items() if one is not None and one.is_stopped}

    def gone(self) -> set[int]:
        """The peers whose processes have ended."""
        return {rank for rank, peer in self._known.items() if peer.look() is None}

    @property
    def are_all_awake(self) -> bool:
        """Whether every peer may join a collective."""
        return len(self.awake()) == len(self._known)

    def end(self, ranks: Iterable[int]) -> list[int]:
        """Kill these; return those that were there."""
        ended = []
        for rank in ranks:
            peer = self._known.get(rank)
            if peer is not None and peer.look() is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(peer.pid, signal.SIGKILL)
                    ended.append(rank)
        return ended

    @property
    def copied(self) -> set[int]:
        """Ranks on another node of whose pages the agent keeps copies."""
        return set(self._copies)

    def __iter__(self) -> Iterator[int]:
        """The ranks of those on this node."""
        return iter(tuple(self._known))

    def pages(self) -> dict[int, Page]:
        """Their status pages; one that cannot be read counts as missing."""
        found = {}
        files = self._copies | {rank: peer.page for rank, peer in self._known.items()}
        for rank, page in files.items():
            with contextlib.suppress(OSError, *UNSOUND):
                found[rank] = Page(page)
        return found

    def forget(self) -> None:
        """Close the pages; in a forked child, for that child alone."""
        known, self._known = self._known, {}
        for peer in known.values():
            os.close(peer.page)
        self._forget_copies()

    def _forget_copies(self) -> None:
        copies, self._copies = self._copies, {}
        for page in copies.values():
            os.close(page)
