"""The status pages of the present attempt: written by ranks, readable after their death.

A worker writes its page, so no content is trusted to be sound: a page that cannot be read counts as
missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Mapping
from time import monotonic_ns
from typing import NamedTuple
from weakref import finalize

from worker_hooks.contract.packed_page import packed, unpacked
from worker_hooks.contract.status_page import Heartbeat, Pace, Page, Phase
from worker_hooks.storage.private_records import UNSOUND

STEADY_NS = 20_000_000  # what would move a heartbeat by less is no news
_WINDOW_NS = 60_000_000_000


class _Clock(NamedTuple):
    """How far another node's clock is behind this one: what messages need is in it, so the least.

    Of the last minute or two, as a clock may stand while its virtual machine does.
    """

    behind_ns: int  # as it is used
    least_ns: int  # since ``since_ns``
    before_ns: int  # the least of the time before that
    since_ns: int

    @staticmethod
    def first(now_ns: int) -> _Clock:
        """As of the first message."""
        here = monotonic_ns()
        return _Clock(here - now_ns, here - now_ns, here - now_ns, here)

    def heard(self, now_ns: int) -> _Clock:
        """As of another message."""
        here = monotonic_ns()
        behind, clock = here - now_ns, self
        if behind >= self.least_ns and here - self.since_ns <= _WINDOW_NS:
            return self  # as a rule; it is asked of each rank each second
        if here - self.since_ns > _WINDOW_NS:
            clock = _Clock(self.behind_ns, behind, self.least_ns, here)
        clock = clock._replace(least_ns=min(clock.least_ns, behind))
        best = min(clock.least_ns, clock.before_ns)
        return clock if abs(best - clock.behind_ns) <= STEADY_NS else clock._replace(behind_ns=best)


class StatusPages:
    """One page per rank, mapped; the newest that a rank sent."""

    def __init__(self) -> None:
        self._pages: dict[int, Page] = {}
        self._replaced: dict[int, Page] = {}  # of dead ranks, until another one is in their place
        self._files: dict[int, int] = {}  # the descriptors of the pages: open as long as they are
        self._known: dict[int, dict[int, int]] = {}  # rank -> slot -> record, as of the last news
        self._unshared: set[int] = set()  # ranks whose page is newer than what peers have
        self._clocks: dict[int, _Clock] = {}  # of ranks of other nodes

    def keep(self, rank: int, attempt: int, fd: int, *, is_copy: bool = False) -> None:
        """Map a rank's page; ``fd`` is kept, or closed.

        ``is_copy``: of a page on another node, whose clock is another one.

        Raises:
            ValueError: it is no page of this rank and attempt, or could be cut short under us.
            OSError: it cannot be mapped.
        """
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("not a sealed status page")  # reading past its end would kill us
            page = Page(fd)
            if (page.rank, page.attempt) != (rank, attempt):
                raise ValueError(f"it is the page of rank {page.rank}")
        except UNSOUND as error:
            os.close(fd)
            raise ValueError(f"rank {rank} sent no status page: {error}") from error
        except OSError:
            os.close(fd)
            raise
        finalize(page, os.close, fd)
        self._pages[rank], self._files[rank] = page, fd
        self._replaced.pop(rank, None)
        self._known.pop(rank, None)
        self._unshared.add(rank)
        if is_copy:
            self._begin_clock(rank, page)

    def receive(self, rank: int, attempt: int, fds: list[int]) -> str:
        """Keep the page that a rank has sent; why that cannot be, or empty.

        ``fds``: what came beside its message; the page is taken out.
        """
        if len(fds) != 1:
            return f"rank {rank} sent {len(fds)} pages"
        try:
            self.keep(rank, attempt, fds.pop())
        except (ValueError, OSError) as error:
            return str(error)
        return ""

    def keep_copy(self, rank: int, attempt: int, octets: bytes) -> None:
        """Keep a copy of a packed page of another node, in memory of this process alone.

        Raises:
            ValueError: it is no page of this rank and attempt.
            OSError: there is no memory.
        """
        try:
            page = unpacked(octets)
            if (page.rank, page.attempt) != (rank, attempt):
                raise ValueError(f"it is the page of rank {page.rank}")
        except UNSOUND as error:
            raise ValueError(f"rank {rank} sent no status page: {error}") from error
        self._pages[rank] = page
        self._replaced.pop(rank, None)
        self._files.pop(rank, None)
        self._known.pop(rank, None)
        self._begin_clock(rank, page)

    def _begin_clock(self, rank: int, page: Page) -> None:
        """Of a page on another node, whose clock is another one: later beats come with the time."""
        if rank not in self._clocks:
            with contextlib.suppress(*UNSOUND):
                self._clocks[rank] = self._clock(rank, page.heartbeat().at_ns)

    def _clock(self, rank: int, now_ns: int) -> _Clock:
        """It was ``now_ns`` or later by the clock of a rank's node when this was sent."""
        clock = self._clocks.get(rank)
        return _Clock.first(now_ns) if clock is None else clock.heard(now_ns)

    def content(self, rank: int) -> bytes:
        """The bytes of a rank's page; empty: it has none."""
        page = self._pages.get(rank)
        return b"" if page is None else page.content()

    def packed(self, rank: int) -> bytes:
        """What a rank's page holds, without gaps; empty: it has none."""
        page = self._pages.get(rank)
        try:
            return b"" if page is None else packed(page)
        except UNSOUND:
            return b""

    def has_page(self, rank: int, attempt: int) -> bool:
        """Whether a rank has a page of this attempt."""
        page = self._pages.get(rank)
        return page is not None and page.attempt == attempt

    def attempt(self, rank: int) -> int:
        """The attempt of a rank's page, which it must have."""
        attempt: int = self._pages[rank].attempt
        return attempt

    def has_device_areas(self, rank: int) -> bool:
        """Whether a part of a rank's page is written by a device, which :meth:`news` leaves out."""
        page = self._pages.get(rank)
        return page is not None and page.device_bytes > 0

    def news(self, rank: int) -> list[tuple[int, bytes]]:
        """What a rank has written to its page since the last call."""
        page = self._pages.get(rank)
        return [] if page is None else page.news(self._known.setdefault(rank, {}))

    def mirror_news(self, rank: int, attempt: int, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Put what :meth:`news` returned on another node into the copy of the page."""
        page = self._pages.get(rank)
        if page is not None and page.attempt == attempt:
            with contextlib.suppress(ValueError):
                page.put(pieces)

    def raw_beats(self) -> dict[int, bytes]:
        """The heartbeats of all ranks as they are in their pages."""
        return {rank: page.raw_beat() for rank, page in self._pages.items()}

    def mirror_beats(self, now_ns: int, beats: Mapping[int, bytes]) -> None:
        """Put heartbeats of another node, whose clock says ``now_ns``, into the copies of pages."""
        clock: _Clock | None = None
        for rank, beat in beats.items():
            page = self._pages.get(rank)
            if page is not None:
                clock = clock or self._clock(rank, now_ns)  # that of all its ranks
                self._clocks[rank] = clock
                try:  # of thousands of ranks each second: contextlib.suppress takes a microsecond
                    page.put_beat(beat)
                except ValueError:
                    continue

    def take_unshared(self, ranks: Iterable[int], attempt: int) -> dict[int, int]:
        """The descriptors of the pages that peers lack, by rank, once each.

        Nothing before all of these ranks have a page of this attempt: those of the last one are
        about to be replaced.
        """
        present = all(
            (page := self._pages.get(rank)) is not None and page.attempt == attempt
            for rank in ranks
        )
        if not present:
            return {}
        found = {rank: self._files[rank] for rank in sorted(self._unshared)}
        self._unshared.clear()
        return found

    def has(self, rank: int, file: int) -> bool:
        """Whether this descriptor is still that of the rank's page."""
        return self._files.get(rank) == file

    def newest_step(self, rank: int) -> int | None:
        """A rank's newest commit; ``None``: it has no page or committed nothing."""
        try:
            return None if (page := self._pages.get(rank)) is None else page.newest_step()
        except UNSOUND:
            return None

    def complete(self, rank: int, steps: Iterable[int]) -> None:
        """The records of these commits count: a dead rank has noted that it had written them."""
        with contextlib.suppress(*UNSOUND):
            if (page := self._pages.get(rank)) is not None:
                for step in steps:
                    page.complete(step)

    def phases(self) -> dict[int, Phase]:
        """What the ranks' main threads are doing."""
        found = {}
        for rank, page in self._pages.items():
            with contextlib.suppress(*UNSOUND):
                found[rank] = page.heartbeat().phase
        return found

    def newest_of_all(self) -> int:
        """The newest step that any rank has committed; 0: none."""
        return max((self.newest_step(rank) or 0 for rank in self._pages), default=0)

    def newest_commits(self, ranks: Iterable[int]) -> list[tuple[int, int]]:
        """The newest commit of each of these ranks that has one, and its time in monotonic ns.

        Times are of this node's clock.
        """
        found = []
        for rank in ranks:
            with contextlib.suppress(*UNSOUND):
                page = self._pages.get(rank)
                if page is not None and (commit := page.newest_commit()) is not None:
                    clock = self._clocks.get(rank)
                    step, at_ns = commit
                    found.append((step, at_ns + (0 if clock is None else clock.behind_ns)))
        return found

    def position(self, ranks: Iterable[int], step: int) -> tuple[int, int] | None:
        """Epoch, counted from 1, and batch of a step, as the first of these ranks knows them."""
        for rank in ranks:
            with contextlib.suppress(*UNSOUND):
                page = self._pages.get(rank)
                if page is not None and (found := page.position(step)) is not None:
                    return found[0] + 1, found[1]
        return None

    def beats(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """How far each of these ranks is that has a page; times are of this node's clock."""
        found = {}
        for rank in ranks:
            if (page := self._pages.get(rank)) is not None:
                clock = self._clocks.get(rank)
                try:
                    found[rank] = page.heartbeat(0 if clock is None else clock.behind_ns)
                except UNSOUND:
                    continue
        return found

    def paces(self, ranks: Iterable[int]) -> dict[int, list[Pace]]:
        """How long the last steps took of each of these ranks that has a page."""
        found = {}
        for rank in ranks:
            if (page := self._pages.get(rank)) is not None:
                with contextlib.suppress(*UNSOUND):
                    found[rank] = page.paces()
        return found

    def all(self) -> Mapping[int, Page]:
        """Every page by rank, mapped for as long as the answer is kept."""
        return dict(self._pages)

    def replaced(self) -> Mapping[int, Page]:
        """By rank the pages that were dropped, and have no successors yet."""
        return self._replaced

    def drop(self, rank: int) -> None:
        """A rank is gone for good; its page is the newest of its place until another one comes."""
        if (page := self._pages.pop(rank, None)) is not None:
            self._replaced[rank] = page
        self._clocks.pop(rank, None)
        self._unshared.discard(rank)

    def clear(self) -> None:
        """Forget them: their attempt is over."""
        self._pages.clear()
        self._replaced.clear()
        self._clocks.clear()
        self._unshared.clear()
