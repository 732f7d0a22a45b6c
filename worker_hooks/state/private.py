"""The private state of a rank, kept on its status page: buffers, randomness, place in the data.

The page has room for the places of two loaders. While the script is in a loop over one loader, the
newest commit may have been made in the loop over another, and must stay readable as it was until
the next commit: some ranks may still be in the first loop, and all must resume at the same place.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from worker_hooks.contract import status_page as pages
from worker_hooks.contract.fingerprint import BUFFER, LATE, ONE_OF_BUFFERS, bundled
from worker_hooks.contract.script_record import SCRIPT
from worker_hooks.contract.status_page import (
    BEFORE,
    LATE_BUFFERS,
    LATE_BYTES,
    META_BYTES,
    UNDER_WAY,
    CommitRecord,
    Entry,
    Page,
    late_draws,
)
from worker_hooks.device.stamped_copies import StampedCopies
from worker_hooks.rng.generators import copy
from worker_hooks.rng.randomness import Randomness, Recorder
from worker_hooks.script.kept import ScriptValues
from worker_hooks.script.values import LARGE_BYTES
from worker_hooks.state.buffers import MOST_KEPT, Buffers, with_unsaved
from worker_hooks.state.registry import Piece, named_objects
from worker_hooks.state.stateful import RankObjects

log = logging.getLogger("msrun")

PREFIXES = ("", "1:")
"""Prefixes of the names of what loaders write, by their place on the page."""

EPOCH = "epoch:"
"""Prefix of the names of the randomness that the epoch began with."""

_SCRIPT_BYTES = 16 << 10  # room for the script's own values at first

_LATE_BYTES = 64 << 10  # of buffers on a device, compared once a step

_MOST_LATE = 100  # buffers that are compared each by itself, to be named if they differ by rank

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


PrivateParts = list[tuple[Entry, memoryview]]
"""Contents of a record by entry."""


class Position(NamedTuple):
    """Where in the data a rank is."""

    epoch: int
    batch: int  # consumed in this loop
    meta: bytes = b"{}"


class PrivateSource(Protocol):
    """A loader, as the page needs it."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What :meth:`fill` writes; never changes."""

    def fill(self, address: int, known: dict[str, bytes] | None = None) -> int:
        """Write it; the count of bytes. ``known``: what it has written there before."""


@dataclass(slots=True)
class _RecordWriter:
    """What writes one record of the page again and again, and what it has written there."""

    address: int
    randomness_at: int
    randomness: Recorder
    states: tuple[ctypes.Array[ctypes.c_ubyte], ...]  # of each generator, as written
    epoch_start_at: int
    known: tuple[dict[str, bytes], ...]  # what each source has written
    epoch_start: bytes = b""
    before: bytes = b""
    script: bytes = b""


class PrivateState:
    """One rank's private state and its page; before :meth:`open` nothing is written."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.buffers = Buffers(pieces)
        self.randomness = Randomness()
        self.script = ScriptValues(
            lambda: named_objects(pieces), RankObjects(pieces), self.buffers.place_of
        )
        self.page: Page | None = None
        self._large: frozenset[tuple[str, torch.Size]] = frozenset()  # of the commit before
        self.present: int | None = None
        """The step whose commit is the present state as a page is made; ``None``: none is."""
        self.late_buffers: set[str] = set()
        """Buffers that have changed between the last backward of a step and its commit."""
        self._moved_late: set[str] = set()  # those that have in the step of the newest commit
        self._copies: StampedCopies | None = None  # of buffers on a device to the page
        self._retired: list[StampedCopies] = []  # to pages before it
        self._has_compared = False  # buffers on a device, as of a backward and of its commit
        # by name, the randomness that the epoch began with
        self._epoch_start: dict[str, bytes] = {}
        self._epoch_start_bytes = b""  # the same as it is written
        self._sources: list[PrivateSource | None] = [None] * len(PREFIXES)
        self._place = 0  # of the current source
        self._committed = 0  # of the source in whose loop the newest commit was made
        self._offset = 0  # of what the current source writes, after buffers and randomness
        self._script_at = 0  # of the script's values, the last entry
        self._script_bytes = 0  # room for them
        self._meta_bytes = 0  # room for the position's JSON
        self._slot = 0  # of the record that is written
        self._step = 0  # of the same
        # of each generator: whether it was ever drawn from between a backward and its commit
        self._drawn_late: list[bool] = []
        self._unmoved = b""  # the same, as :class:`LateDraws` where that is not so in this step
        self._packed: Callable[..., bytes] = struct.pack
        self._writers: dict[int, _RecordWriter] = {}  # by slot
        self._steps: dict[int, int] = {}  # by slot: the step that was written last

    def forget(self) -> None:
        """Drop the page, as in a forked child."""
        self.page = None
        self._sources = [None] * len(PREFIXES)
        self._place = self._committed = 0
        self._writers.clear()
        self._steps.clear()
        self._retire()
        self.buffers.forget()

    def look_at_buffers(self, *, is_commit: bool) -> bool:
        """Have buffers that are not on the page kept as the script's values are, if they are small.

        To be called before the script's values are looked at.

        Returns:
            Whether what is written with the place in the data is to be made anew.
        """
        has_others = self.buffers.look(is_commit=is_commit)
        if has_others or self.buffers.unsaved:
            kept = self.buffers.unsaved_up_to(MOST_KEPT)
            if kept != self.script.resized.asked:
                self.script.keep_buffers(kept)
            self.script.newly_large += self.buffers.newly_unsaved()
        return has_others

    def needs_new_page(self) -> bool:
        """Whether there are buffers that belong on a page, which is to be another one for that.

        One that changes its size in each step is kept as a value, if it is not too large.
        """
        if not self.buffers.unsaved:
            return False
        was, self._large = self._large, self.buffers.larger_than(LARGE_BYTES)
        return bool(self.buffers.larger_than(MOST_KEPT)) or bool(was & self._large)

    def begin_epoch(self) -> None:
        """Keep the randomness from which the script draws between here and its loop.

        After a resume it draws there a second time.
        """
        now = Randomness()
        self._epoch_start = now.split(now.capture())
        self._join_epoch_start()

    def place_of(self, source: PrivateSource) -> int:
        """Where on the page this source is, or will be: not in the place of the newest commit."""
        for place, each in enumerate(self._sources):
            if each is source:
                return place
        return 0 if self.page is None else 1 - self._committed

    def switch_to(self, source: PrivateSource) -> bool:
        """Write the place of this source from now on; false: the page has no room for it."""
        is_there = any(each is source for each in self._sources)
        if is_there:
            self._place = self.place_of(source)
            self._set_offset()
        return is_there

    def open(
        self,
        rank: int,
        attempt: int,
        source: PrivateSource,
        meta: bytes,
        held: tuple[torch.device, ...] = (),
    ) -> int:
        """Make a page with room for this source, and copy what the previous page has.

        If buffers are on a device, this waits for it.

        Args:
            source: the loader that is read now.
            meta: JSON of the size to expect.
            held: the devices that hold replicated state; they lag behind the commits.

        Returns:
            The page's descriptor.

        Raises:
            OSError: there is no memory.
        """
        self._retire()
        while self._retired:
            self._retired.pop().close()
        self._place = self.place_of(source)
        self._sources[self._place] = source
        self._set_offset()
        before = [entry.name for entry in self.randomness.entries][: len(self._drawn_late)]
        old, self.randomness = self.page, Randomness()  # of all generators in use by now
        self._join_epoch_start()
        entries = [*self.buffers.host_entries, *self.randomness.entries]
        luck = self.randomness.entries
        entries += [entry._replace(name=EPOCH + entry.name) for entry in luck]
        entries += [Entry(BEFORE + entry.name, "U8", (LATE_BYTES,), LATE_BYTES) for entry in luck]
        if count := len(self.buffers.host_entries):
            entries.append(Entry(LATE_BUFFERS, "U8", (count,), count))
        for prefix, each in zip(PREFIXES, self._sources, strict=True):
            sources = () if each is None else each.entries
            entries += [entry._replace(name=prefix + entry.name) for entry in sources]
        self._script_at = sum(entry.nbytes for entry in entries)
        room = self._script_bytes = max(_SCRIPT_BYTES, 2 * len(self.script.content))
        entries.append(Entry(SCRIPT, "U8", (room,), room))
        entries += self.buffers.device_entries
        records = [] if old is None else old.records()
        size = max([len(meta), *[len(record.meta) for record in records]])
        self._meta_bytes = max(META_BYTES, 4 * size)
        device_bytes = self.buffers.device_nbytes
        fd = pages.create(
            *(rank, attempt, entries, self._meta_bytes),
            device_bytes=device_bytes,
            runs_ahead=bool(held),
        )
        page = Page(fd)
        self.buffers.forget()
        self._writers.clear()
        self._steps.clear()
        known = dict(zip(before, self._drawn_late, strict=True))
        self._drawn_late = [known.get(entry.name, False) for entry in luck]
        self._packed = late_draws(len(luck))
        self._unmoved = self._draws([(0, False)] * len(luck))
        if old is not None:
            for record in records:
                is_present = record.is_commit and record.step == self.present
                self._copy(page, record, old.entries, is_present=is_present)
        self.present = None
        if old is not None:
            page.continue_from(old)
        self.page = page
        self._copies = self.buffers.device_copies(page, held)
        return fd

    def has_room(self, position: Position, times: int = 1) -> bool:
        """Whether the page has room for so many of this, and for what the script keeps."""
        is_short = times * len(position.meta) <= self._meta_bytes
        is_small = len(self.script.content) <= self._script_bytes * 3 // 4
        return self.page is None or (is_short and is_small)

    def settle(self, step: int, position: Position) -> bool:
        """Only the commit is missing: write all as it will be then.

        ``position``: where in the data it will be committed.

        Returns:
            Whether it is so already.
        """
        if not self.script.settle() or not self.has_room(position):
            return False
        # a device has copied its buffers as backward began; what is queued now may never be done
        self._write(step, position, is_commit=False)
        return True

    def write(
        self,
        step: int,
        position: Position,
        *,
        is_commit: bool,
        noted: Callable[[PrivateParts], None] | None = None,
    ) -> None:
        """Write the state as of a commit, or of the step under way.

        Args:
            step: the commit's, or the one under way.
            position: where in the data it is.
            noted: called with the buffers in host memory as written, before the record counts.
        """
        page, copies = self.page, self._copies
        if is_commit and copies is not None:
            self._look_at_device(step)
        self._write(step, position, noted, is_commit=is_commit)
        if page is not None and copies is not None:
            area = page.device_area(step, is_commit=is_commit)
            self.buffers.copy_device(copies, area, step)

    def wait(self) -> None:
        """Wait until a device has copied its buffers. For the main thread, seldom."""
        if self._copies is not None:
            self._copies.wait()

    def may_have_late_buffers(self) -> bool:
        """Whether buffers on a device change behind backward, as far as is known by now."""
        if self._copies is None:
            return False
        late = self.late_buffers
        is_late = late and any(entry.name in late for entry in self.buffers.device_entries)
        return bool(is_late) or not self._has_compared

    def _write(
        self,
        step: int,
        position: Position,
        noted: Callable[[PrivateParts], None] | None = None,
        *,
        is_commit: bool,
    ) -> None:
        page = self.page
        if page is None:
            return
        entries, nbytes = self.buffers.host_entries, self.buffers.nbytes  # the first of all

        def seen(address: int) -> None:
            if noted is not None:
                noted(_parts(entries, ctypes.string_at(address, nbytes)))

        slot = self._slot = page.slot(step, is_commit=is_commit)
        self._step = step
        try:
            page.write(step, *position, self._fill, seen, is_commit=is_commit)
        except ValueError as error:
            log.warning("the rank's place in its data is not saved: %s", error)
            position = position._replace(meta=b"{}")
            page.write(step, *position, self._fill, seen, is_commit=is_commit)
        self._steps[slot] = step
        if is_commit:
            self._committed = self._place

    def read(self, step: int) -> PrivateParts:
        """What the page has of a step, by entry; empty if it has no record of it."""
        page = self.page
        record = None if page is None else page.record(step)
        if page is None or record is None:
            return []
        return _parts(page.entries, record.payload)

    def _fill(self, address: int) -> None:
        slot = self._slot
        writer = self._writers.get(slot) or self._writer(address, slot)
        if self.buffers.nbytes:
            self.buffers.fill(address, slot)
            if slot != UNDER_WAY:
                self._find_late_buffers(slot, address)
        writer.randomness.write()
        # what does not change in each step is not written in each step
        before = self._unmoved if slot == UNDER_WAY else self._late_draws(writer)
        start = self._epoch_start_bytes
        if writer.epoch_start is not start:
            copy(writer.epoch_start_at, start, len(start))
            writer.epoch_start = start
        before_at = writer.epoch_start_at + len(start)
        if writer.before is not before:
            copy(before_at, before, len(before))
            writer.before = before
        source = self._sources[self._place]
        if source is not None:
            source.fill(before_at + len(before) + self._offset, writer.known[self._place])
        script = self.script.content
        if writer.script is not script and len(script) <= self._script_bytes:
            copy(address + self._script_at, script, len(script))
            writer.script = script

    def _writer(self, address: int, slot: int) -> _RecordWriter:
        randomness_at = address + self.buffers.nbytes
        writer = self._writers[slot] = _RecordWriter(
            address=address,
            randomness_at=randomness_at,
            states=tuple(_states(randomness_at, self.randomness.entries)),
            randomness=self.randomness.recorder(randomness_at),
            epoch_start_at=randomness_at + self.randomness.nbytes,
            known=tuple({} for _ in self._sources),
        )
        return writer

    def _join_epoch_start(self) -> None:
        """Update the bytes; a generator that came into use meanwhile counts as it is now."""
        states = self.randomness.split(self.randomness.capture())
        for name, state in states.items():
            if len(self._epoch_start.get(name, b"")) == len(state):
                states[name] = self._epoch_start[name]
        self._epoch_start_bytes = b"".join(states.values())

    def _set_offset(self) -> None:
        before = self._sources[: self._place]
        self._offset = sum(
            entry.nbytes for each in before if each is not None for entry in each.entries
        )

    def _retire(self) -> None:
        """A device may still write to the page; no new copy to it is queued."""
        if self._copies is not None:
            self._retired.append(self._copies)
        self._copies = None

    def _copy(
        self, page: Page, record: CommitRecord, entries: Sequence[Entry], *, is_present: bool
    ) -> None:
        """Copy another page's record to this page; what it lacks is written as it is at present.

        ``is_present``: the record is that of the present state; else it says which buffers are not
        in it, as they had another size then.
        """
        there = {entry.name: (entry, octets) for entry, octets in _parts(entries, record.payload)}
        on_device = self.buffers.device_entries
        if on_device:
            found = [there.get(entry.name, (None, b"")) for entry in on_device]
            now = memoryview(b"")
            if any(old != entry for (old, _), entry in zip(found, on_device, strict=True)):
                now = memoryview(self.buffers.read_device())
            parts, at = list[bytes | memoryview](), 0
            for (old, octets), entry in zip(found, on_device, strict=True):
                parts.append(octets if old == entry else now[at : at + entry.nbytes])
                at += entry.nbytes
            is_whole = record.is_commit and not record.has_early_buffers
            page.write_device(record.step, 0, b"".join(parts), is_commit=is_whole)

        def fill(address: int) -> None:
            self._slot = page.slot(record.step, is_commit=record.is_commit)
            self._fill(address)
            for entry in page.entries[: len(page.entries) - len(on_device)]:
                old, octets = there.get(entry.name, (None, b""))
                if old == entry or (old is not None and entry.name == SCRIPT):
                    ctypes.memmove(address, bytes(octets), min(entry.nbytes, len(octets)))
                address += entry.nbytes

        held = *self.buffers.host_entries, *on_device
        others = {each.name for each in held if each not in entries}
        meta = with_unsaved(record.meta, others, is_present=is_present)
        is_commit = record.is_commit
        page.write(record.step, record.epoch, record.batch, meta, fill, is_commit=is_commit)
        self.buffers.forget()  # the copied record may differ from the present state
        self._writers.clear()

    def _late_draws(self, writer: _RecordWriter) -> bytes:
        """What the record of a commit says of its generators: whether they have moved on."""
        under_way, count = self._writers.get(UNDER_WAY), len(writer.states)
        if under_way is None:  # where training begins
            return self._unmoved
        if self._steps.get(UNDER_WAY) != self._step:
            return self._draws([(0, True)] * count)  # there was no backward in this step
        now, then = writer.randomness, under_way.randomness
        if now.seen == then.seen and now.sees_all:  # this costs less than to compare the states
            return self._unmoved
        size = self.randomness.nbytes
        if not _memcmp(writer.randomness_at, under_way.randomness_at, size):
            return self._unmoved
        pairs = zip(writer.states, under_way.states, strict=True)
        moved = [bytes(now) != bytes(then) for now, then in pairs]
        self._drawn_late = [has or late for has, late in zip(moved, self._drawn_late, strict=True)]
        self._unmoved = self._draws([(0, False)] * count)
        return self._draws(list(zip(map(zlib.crc32, under_way.states), moved, strict=True)))

    def _draws(self, crcs: Sequence[tuple[int, bool]]) -> bytes:
        known = zip(crcs, self._drawn_late, strict=True)
        draws = self._packed(*chain.from_iterable((*pair, late) for pair, late in known))
        late, moved = self.late_buffers, self._moved_late
        names = (entry.name for entry in self.buffers.host_entries)
        return draws + bytes((name in late) + (name in moved) for name in names)

    def has_drawn_late(self) -> bool:
        """Whether random numbers were drawn after backward began, now or in any step before."""
        if self.page is None:
            return False
        under_way = self._writers.get(UNDER_WAY)
        if any(self._drawn_late) or under_way is None:
            return True
        return self.randomness.capture() != b"".join(map(bytes, under_way.states))

    def _find_late_buffers(self, slot: int, address: int) -> None:
        """A commit: find the buffers that changed after the record of the step under way."""
        under_way = self._writers.get(UNDER_WAY)
        if under_way is None or self._steps.get(UNDER_WAY) != self._step:
            return
        found = {*self.buffers.differing((slot, UNDER_WAY), (address, under_way.address))}
        if found != self._moved_late:
            self._moved_late = found
            self.late_buffers |= found
            self._unmoved = self._draws([(0, False)] * len(self._drawn_late))

    def late_values(self) -> dict[str, str]:
        """The buffers that change between a backward and its commit, as texts to be compared."""
        page, late = self.page, self.late_buffers
        if page is None or not late:
            return {}
        record = page.newest()
        parts = [] if record is None else _parts(page.entries, record.payload)
        texts = {e.name: f"{zlib.crc32(octets):08x}" for e, octets in parts if e.name in late}
        are_all = len(texts) <= _MOST_LATE
        return {
            f"{LATE}{BUFFER if are_all or name in texts else ONE_OF_BUFFERS} `{name}`": text
            for name, text in bundled(texts, most=_MOST_LATE).items()
        }

    def _look_at_device(self, step: int) -> None:
        """A commit: look at what the device has written as of the one before, if it has.

        It has yet to overwrite that: this commit's copies are not queued, and two of each kind are
        kept.
        """
        page = self.page
        if page is not None:
            self._find_late_on_device(step - 1)

            def read(slot: int, start: int, stop: int) -> bytes | None:
                of = step - 1 if slot == (step - 1) % 2 else step - 2
                return page.device_part(of, is_commit=True, start=start, stop=stop)

            self.buffers.compare_device((step % 2, (step - 1) % 2), read)

    def late_as_of(self, step: int) -> set[str]:
        """The late buffers, with what a device has shown of this step by now."""
        self._find_late_on_device(step)
        return self.late_buffers

    def _find_late_on_device(self, step: int) -> None:
        """Find the buffers that a device has changed between the backward of a step and its commit.

        Nothing is found unless the device has copied both, and neither is overwritten.
        """
        page = self.page
        if page is None or self._copies is None:
            return
        end = min(page.device_bytes, _LATE_BYTES)
        then = page.device_part(step, is_commit=False, stop=end)
        now = page.device_part(step, is_commit=True, stop=end)
        if then is None or now is None:
            return
        self._has_compared = True
        at = 0
        for entry in self.buffers.device_entries if then != now else ():
            after = at + entry.nbytes
            if then[at:after] != now[at:after] and after <= end:
                self.late_buffers.add(entry.name)
            at = after


def _states(at: int, entries: Sequence[Entry]) -> Iterator[ctypes.Array[ctypes.c_ubyte]]:
    """The memory of these entries, which begin at an address."""
    for entry in entries:
        yield (ctypes.c_ubyte * entry.nbytes).from_address(at)
        at += entry.nbytes


def placed(octets: dict[str, bytes], place: int) -> dict[str, bytes]:
    """A record's contents for the loader in ``place``: its entries have their own names again."""
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


def _parts(entries: Sequence[Entry], payload: bytes) -> PrivateParts:
    found, at, whole = [], 0, memoryview(payload)
    for entry in entries:
        found.append((entry, whole[at : at + entry.nbytes]))
        at += entry.nbytes
    return found
