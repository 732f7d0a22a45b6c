"""What a rank has for itself, kept on its status page: buffers, randomness, its place in the data.

The page has room for the data of two loaders. A commit made in the loop over one must be readable
as it was while the script is in a loop over another, until the next commit: some ranks may still be
in the first loop, and all must go on from the same place.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from worker_hooks.contract import status_page as pages
from worker_hooks.contract.status_page import META_BYTES, UNDER_WAY, CommitRecord, Entry, Page
from worker_hooks.rng.generators import copy
from worker_hooks.rng.randomness import Randomness
from worker_hooks.state.buffers import Buffers
from worker_hooks.state.registry import Piece

log = logging.getLogger("msrun")

PREFIXES = ("", "1:")
"""Before the names of what loaders have, by their place on the page."""

EPOCH = "epoch:"
"""Before the names of the randomness that the epoch began with."""

_LATE_BYTES = 64 << 10  # of buffers, looked at once a step

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Position(NamedTuple):
    """Where in the data a rank is."""

    epoch: int
    batch: int  # consumed in this loop
    meta: bytes = b"{}"


class PrivateSource(Protocol):
    """A loader as the page sees it."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What it writes; never changes."""

    def fill(self, address: int, known: dict[str, bytes] | None = None) -> int:
        """Write it; how many bytes that were. ``known``: what it has written there before."""


class _Room(NamedTuple):
    """A record's place on the page, as it is written again and again."""

    address: int
    draws: tuple[Callable[[], None], ...]  # write the randomness
    began: list[bytes]  # what is there of the epoch's begin; one, or none
    began_at: int
    known: tuple[dict[str, bytes], ...]  # what each source has written


class PrivateState:
    """One rank's own state and its page; without :meth:`open` nothing is written."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.buffers = Buffers(pieces)
        self.randomness = Randomness()
        self.page: Page | None = None
        self.late: set[str] = set()
        """Buffers that were seen to change between the last backward of a step and its commit."""
        self._began: dict[str, bytes] = {}  # randomness, as the epoch began
        self._began_whole = b""  # as it is written
        self._sources: list[PrivateSource | None] = [None] * len(PREFIXES)
        self._place = 0  # of the present source
        self._committed = 0  # of the one whose loop the newest commit was made in
        self._offset = 0  # of what the present source writes, behind buffers and randomness
        self._slot = 0  # the record that is written
        self._rooms: dict[int, _Room] = {}  # by record
        self._steps: dict[int, int] = {}  # by record: what it is of

    def forget(self) -> None:
        """Be without a page, as before the first one."""
        self.page = None
        self._sources = [None] * len(PREFIXES)
        self._place = self._committed = 0
        self._rooms.clear()
        self._steps.clear()
        self.buffers.forget()

    def begin_epoch(self) -> None:
        """Remember what the script will draw from between here and its loop.

        After a resume it comes by there a second time.
        """
        now = Randomness()
        self._began = now.split(now.capture())
        self._join_began()

    def place_of(self, source: PrivateSource) -> int:
        """Where on the page this one's state is, or will be: never where the newest commit's is."""
        for place, each in enumerate(self._sources):
            if each is source:
                return place
        return 0 if self.page is None else 1 - self._committed

    def turn_to(self, source: PrivateSource) -> bool:
        """Write the state of this one from now on; false: the page has no room for it."""
        is_there = any(each is source for each in self._sources)
        if is_there:
            self._place = self.place_of(source)
            self._set_offset()
        return is_there

    def open(self, rank: int, attempt: int, source: PrivateSource, step: int, meta: bytes) -> int:
        """Make a page with room for this source; the commit is carried over from the one before.

        Args:
            rank: whose page it is.
            attempt: which life of it.
            source: the loader that is read now.
            step: the newest commit.
            meta: JSON of a size that is to be expected.

        Returns:
            The page's descriptor.

        Raises:
            OSError: no memory.
        """
        self._place = self.place_of(source)
        self._sources[self._place] = source
        self._set_offset()
        old, self.randomness = self.page, Randomness()  # of what is in use by now
        self._join_began()
        entries = [*self.buffers.entries, *self.randomness.entries]
        entries += [entry._replace(name=EPOCH + entry.name) for entry in self.randomness.entries]
        for prefix, each in zip(PREFIXES, self._sources, strict=True):
            sources = () if each is None else each.entries
            entries += [entry._replace(name=prefix + entry.name) for entry in sources]
        record = None if old is None else old.record(step)
        room = len(meta if record is None else record.meta)
        fd = pages.create(rank, attempt, entries, max(META_BYTES, 4 * room))
        page = Page(fd)
        self.buffers.forget()
        self._rooms.clear()
        self._steps.clear()
        if old is not None and record is not None:
            self._carry(page, record, old.entries)
        if old is not None:
            page.continue_from(old)
        self.page = page
        return fd

    def write(self, step: int, position: Position, *, is_commit: bool) -> None:
        """Write down the state as of a commit, or of the step that is under way."""
        page = self.page
        if page is None:
            return
        slot = self._slot = step % 2 if is_commit else UNDER_WAY
        try:
            page.write(step, *position, self._fill, is_commit=is_commit)
        except ValueError as error:
            log.warning("rank's data position is not saved: %s", error)
            page.write(step, *position._replace(meta=b"{}"), self._fill, is_commit=is_commit)
        self._steps[slot] = step
        if is_commit:
            self._committed = self._place
            if self.buffers.nbytes:
                self._look_for_late(step)

    def read(self, step: int) -> list[tuple[Entry, memoryview]]:
        """What the page has of a step, entry by entry; nothing if it has none."""
        page = self.page
        record = None if page is None else page.record(step)
        if page is None or record is None:
            return []
        return _parts(page.entries, record.payload)

    def _fill(self, address: int) -> None:
        slot = self._slot
        room = self._rooms.get(slot) or self._room(address, slot)
        if self.buffers.nbytes:
            self.buffers.fill(address, slot)
        for draw in room.draws:
            draw()
        began = self._began_whole
        if room.began[0] is not began:  # it is another one once an epoch
            copy(room.began_at, began, len(began))
            room.began[0] = began
        source = self._sources[self._place]
        if source is not None:
            source.fill(room.began_at + len(began) + self._offset, room.known[self._place])

    def _room(self, address: int, slot: int) -> _Room:
        draws_at = address + self.buffers.nbytes
        draws, began_at = self.randomness.writers(draws_at), draws_at + self.randomness.nbytes
        known: tuple[dict[str, bytes], ...] = tuple({} for _ in self._sources)
        room = self._rooms[slot] = _Room(address, draws, [b""], began_at, known)
        return room

    def _join_began(self) -> None:
        """Of each source that the page has room for; one that came into use later is as it is."""
        states = self.randomness.split(self.randomness.capture())
        for name, state in states.items():
            if len(self._began.get(name, b"")) == len(state):
                states[name] = self._began[name]
        self._began_whole = b"".join(states.values())

    def _set_offset(self) -> None:
        before = self._sources[: self._place]
        self._offset = sum(
            entry.nbytes for each in before if each is not None for entry in each.entries
        )

    def _carry(self, page: Page, record: CommitRecord, entries: Sequence[Entry]) -> None:
        """Write another page's commit to this one; what is not in it begins as it is now."""
        there = dict(_parts(entries, record.payload))

        def fill(address: int) -> None:
            self._slot = record.step % 2
            self._fill(address)
            for entry in page.entries:
                if entry in there:
                    ctypes.memmove(address, bytes(there[entry]), entry.nbytes)
                address += entry.nbytes

        page.write(record.step, record.epoch, record.batch, record.meta, fill, is_commit=True)
        self.buffers.forget()  # the record may have others than those of now
        self._rooms.clear()

    def _look_for_late(self, step: int) -> None:
        """Find the buffers that the step's record under way did not know as they came to be."""
        if self._steps.get(UNDER_WAY) != step:
            return
        commit, under_way = self._rooms[step % 2].address, self._rooms[UNDER_WAY].address
        size = min(self.buffers.nbytes, _LATE_BYTES)
        if not _memcmp(commit, under_way, size):
            return
        at = 0
        for entry in self.buffers.entries:
            if at + entry.nbytes > size:
                break
            if _memcmp(commit + at, under_way + at, entry.nbytes):
                self.late.add(entry.name)
            at += entry.nbytes


def placed(octets: dict[str, bytes], place: int) -> dict[str, bytes]:
    """Of a record's contents those of the loader in one place, under the names it gave them."""
    prefix = PREFIXES[place]
    named = {
        name: each for name, each in octets.items() if not name.startswith(tuple(PREFIXES[1:]))
    }
    if prefix:
        named |= {
            name.removeprefix(prefix): each
            for name, each in octets.items()
            if name.startswith(prefix)
        }
    return named


def _parts(entries: Sequence[Entry], payload: bytes) -> list[tuple[Entry, memoryview]]:
    found, at, whole = [], 0, memoryview(payload)
    for entry in entries:
        found.append((entry, whole[at : at + entry.nbytes]))
        at += entry.nbytes
    return found
