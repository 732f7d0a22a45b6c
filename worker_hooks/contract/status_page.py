"""The status page: a rank's private state and progress in memory that outlives the rank.

One small anonymous file in shared memory per rank and attempt. The worker writes it with plain
stores and no system call; the agent has the same file open, so kill -9 of the worker loses
nothing. Layout, little endian::

    0     magic, rank, attempt, sizes         written once
    64    the heartbeat: step, epoch, batch, phase, time of the last change
    128   a ring: how long each of the last 64 steps took
    2176  JSON: the entries of a record's payload
    ...   three records: two for alternate commits, one for the step in progress
    ...   if the state is on a device: a record for a third commit
    ...   if buffers are on a device: four areas for their bytes, see below

A record is valid if the numbers at its two ends are equal: a writer that is killed in the middle
leaves them different. The record of the step in progress is written when backward begins, before
the rank can have contributed a gradient. So if its peers finish the step without it, its private
state after that step is known, although it died before its own commit.

The bytes of buffers on a device are written by the device, when it comes to it. By then the main
thread may have written the records of later steps. So these bytes are not in a record but in an
*area* of their own, between two stamps that are written by the device, too, in the order of its
queue: one before the bytes and the same one behind them. Stamps that are equal prove the bytes, and
name their step. Two areas are for alternate commits, two for alternate steps in progress, and what
:meth:`Page.record` returns is a record and the bytes whose stamps name its step, wherever they are.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from time import monotonic_ns
from typing import Any, NamedTuple

MAGIC = b"MSRUNPG2"
PACES = 64  # steps whose times are kept
META_BYTES = 80 << 10  # for a record's JSON: data position, states of loaders, variables

_HEAD = struct.Struct("<8sIIQQQ")  # magic, rank, attempt, description, record, meta bytes
_BEAT_AT = 64
_BEAT = struct.Struct("<QIIQI")  # step, epoch, batch, monotonic ns, phase
_AT, _PHASE = 2, 3  # their places in it, in words of 8 bytes
_PACES_AT = 128
_PACE = struct.Struct("<QQQQ")  # step, its ns, those of them spent waiting, those aside
_TEXT_AT = _PACES_AT + PACES * _PACE.size
BEGIN = _TEXT_AT  # bytes at the begin of a page that are written by small parts
_RECORD = struct.Struct("<QQQIIQ")  # number, step, epoch, batch, meta bytes, monotonic ns
_END = struct.Struct("<Q")
_LATE = struct.Struct("<I??")
LATE_BYTES = _LATE.size
_RECORDS = 3
_DEVICE_AT = _HEAD.size
_DEVICE = struct.Struct("<QI")  # bytes of buffers on a device, records beyond three
_KEEPER_AT = _DEVICE_AT + _DEVICE.size
_KEEPER = struct.Struct("<IQ")  # its process id, the address of the board in its memory
_STAMP = struct.Struct("<q")  # as a device has it
_STAMP_ROOM = 64  # so that what is behind it is aligned
_TURNS = 1 << 20  # copies of one step before their stamps begin anew
_AREAS = 4
RANDOMNESS = "rng."
"""Prefix of the names of entries that hold the state of a process's random generator."""

BEFORE = "before:"
"""Prefix of the names of entries about randomness, see :class:`LateDraws`."""

LATE_BUFFERS = "late_buffers"
"""The name of an entry with a byte for each buffer in host memory, which are the first entries: 1
if it was ever changed between backward and commit, 2 if so in the step of this commit."""

_PACES_SLOT = -1  # as if they were a record

UNDER_WAY = 2
"""The slot of the record of the step in progress."""

_SLOTS = {2: (0, 1), 3: (0, 1, 3)}  # of commits, by how many are kept


class Phase(IntEnum):
    """What a rank's main thread is doing."""

    IDLE = 0  # between epochs, before and after training
    DATA = 1  # from a commit until the next batch is available
    FORWARD = 2  # until backward begins
    BACKWARD = 3  # until an optimizer begins its update
    UPDATE = 4  # inside an optimizer's step: the state is torn
    UPDATED = 5  # after it, until the commit


_IDLE, _BACKWARD, _UPDATED = map(int, (Phase.IDLE, Phase.BACKWARD, Phase.UPDATED))  # faster


class Entry(NamedTuple):
    """One tensor of a record's payload; ``dtype`` is safetensors' name, ``nbytes`` its size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class LateDraws(NamedTuple):
    """What a record knows of one random generator besides its state.

    A rank that dies before its commit leaves the state that preceded its last backward. What it has
    drawn since then can be known from its peers alone.
    """

    crc: int  # of the generator's state as backward began, if it has moved
    has_moved: bool  # between backward and the commit, in the step that the record is of
    was_late: bool  # the same in any step

    def pack(self) -> bytes:
        """As an entry's bytes."""
        return _LATE.pack(*self)

    @staticmethod
    def unpack(octets: bytes | memoryview) -> LateDraws:
        """Of an entry's bytes."""
        return LateDraws(*_LATE.unpack(octets))


def late_draws(count: int) -> Callable[..., bytes]:
    """What packs so many :class:`LateDraws`, given all their fields one after the other."""
    return struct.Struct("<" + "I??" * count).pack


class Heartbeat(NamedTuple):
    """The progress of a rank. ``at_ns`` is monotonic."""

    step: int
    epoch: int
    batch: int
    at_ns: int
    phase: Phase


class Pace(NamedTuple):
    """How long one step took, from the previous commit to its own.

    In backward ranks wait for each other, so a slow rank makes the steps of all long, but own time
    is long only on that rank. Time between an update and the next batch (a commit's callbacks, a
    checkpoint, a validation) or between two loops is *aside*: it is rare and no part of the pace.
    """

    step: int
    step_ns: int
    wait_ns: int  # in BACKWARD
    aside_ns: int = 0  # in UPDATED and IDLE

    @property
    def own_ns(self) -> int:
        """The time in which the rank did not wait for others."""
        return max(0, self.step_ns - self.wait_ns)


class DeviceArea(NamedTuple):
    """Where a device writes the bytes of buffers: addresses."""

    slot: int
    begin: int  # of the stamp that is written first
    octets: int
    end: int  # of the stamp that is written last


def stamp(step: int, turn: int) -> int:
    """What marks the bytes of a step; no two copies in a row have the same. ``step``: 0 or more."""
    return step * _TURNS + turn % (_TURNS - 1) + 1


class CommitRecord(NamedTuple):
    """Private state as of a step. ``payload`` is the concatenated bytes of the entries."""

    step: int
    epoch: int
    batch: int
    at_ns: int
    meta: bytes
    payload: bytes
    is_commit: bool
    has_early_buffers: bool = False
    """Its buffers on a device are as backward began, also where all else is as of the commit."""


class Page:
    """One rank's page; the worker writes it, the agent reads it."""

    def __init__(self, source: Any) -> None:
        """Map an existing page; ``source``: a descriptor, which stays the caller's, or its memory.

        Raises:
            ValueError: this is no page of this version.
        """
        self.size = os.fstat(source).st_size if isinstance(source, int) else len(source)
        if self.size < _TEXT_AT:
            raise ValueError("not a status page")
        self._map: Any = mmap.mmap(source, self.size) if isinstance(source, int) else source
        magic, self.rank, self.attempt, text, record, meta = _HEAD.unpack(self._at(0, _HEAD))
        if magic != MAGIC:
            raise ValueError("not a status page")
        self.device_bytes, more = _DEVICE.unpack(self._at(_DEVICE_AT, _DEVICE))
        self._commits = _SLOTS[3 if more else 2]
        self._record_bytes, self._meta_bytes = record, meta
        self._records_at = _aligned(_TEXT_AT + text)
        self._slots = range(_RECORDS + bool(more))
        self._areas_at = _aligned(self._records_at + len(self._slots) * record)
        self.entries, nbytes = _described(self._map[_TEXT_AT : _TEXT_AT + text])
        self._payload_bytes = nbytes - self.device_bytes
        if not isinstance(self._map, mmap.mmap):  # a copy, which nobody writes by its address
            return
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._beat = memoryview(self._map)[_BEAT_AT : _BEAT_AT + _BEAT.size + 4].cast("Q")
        self._paces = memoryview(self._map)[_PACES_AT:_TEXT_AT].cast("Q")
        self._step = -2  # of this writer's last heartbeat; -2: next to no step
        self._committed = 0  # when it was committed; 0: this writer did not see that
        self._phase = Phase.IDLE
        self._since = 0  # when the phase began
        self._spent = [0] * len(Phase)  # in each phase since that commit
        self._number = 0
        self._metas: dict[int, bytes] = {}  # by slot, the JSON that was written last

    def _at(self, at: int, form: struct.Struct) -> Any:
        return self._map[at : at + form.size]

    def close(self) -> None:
        """Unmap the page; the file stays."""
        if isinstance(self._map, mmap.mmap):
            self._beat.release()  # otherwise the map cannot be closed
            self._paces.release()
            self._map.close()

    def note_keeper(self, pid: int, board: int) -> None:
        """Note who keeps the rank's memory, see :mod:`worker_hooks.machine.kept_memory`."""
        _KEEPER.pack_into(self._map, _KEEPER_AT, pid, board)

    @property
    def keeper(self) -> tuple[int, int]:
        """What was noted there; zeros: nobody keeps it."""
        pid, board = _KEEPER.unpack(self._at(_KEEPER_AT, _KEEPER))
        return pid, board

    def content(self) -> bytes:
        """All bytes of the page."""
        octets: bytes = self._map[:]
        return octets

    def parts(self) -> list[tuple[int, bytes]]:
        """Where each part is that holds something, and its bytes; the rest are zeros."""
        end = self._records_at
        found = [(0, self._map[:_BEAT_AT]), (_TEXT_AT, self._map[_TEXT_AT:end]), *self.news({})]
        if self.device_bytes:
            found.append((self._areas_at, self._map[self._areas_at :]))
        return found

    def news(self, known: dict[int, int]) -> list[tuple[int, bytes]]:
        """What was written to the page since the last call: where each part is, and its bytes.

        What a device writes is left out.

        Args:
            known: the number of each slot's record as of that call, and the newest step with a
                pace; written to.
        """
        found = [(_BEAT_AT, self._map[_BEAT_AT : _BEAT_AT + _BEAT.size])]
        newest = _BEAT.unpack(self._at(_BEAT_AT, _BEAT))[0]
        for step in range(max(known.get(_PACES_SLOT, 0), newest - PACES) + 1, newest + 1):
            at = _PACES_AT + step % PACES * _PACE.size
            octets = self._map[at : at + _PACE.size]
            is_still = octets == self._map[at : at + _PACE.size]
            if is_still and _PACE.unpack(octets)[0] == step:
                found.append((at, octets))
        known[_PACES_SLOT] = newest
        for slot in self._slots:
            head = self._head(slot)
            if head is None or known.get(slot) == head[0]:
                continue
            at = self._records_at + slot * self._record_bytes
            front = self._map[at : at + _RECORD.size + head[4]]
            payload_at = at + _RECORD.size + self._meta_bytes
            back = self._map[payload_at : at + self._record_bytes]
            if self._head(slot) == head:  # else it is being written again
                known[slot] = head[0]
                found += [(at, front), (payload_at, back)]
        return found

    def put(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Write what :meth:`news` returned for the page that this one is a copy of.

        Raises:
            ValueError: it is of another page.
        """
        for at, octets in pieces:
            last = _TEXT_AT if at < _TEXT_AT else min(self._areas_at, len(self._map))
            is_written = _BEAT_AT <= at < _TEXT_AT or self._records_at <= at
            if not (is_written and at + len(octets) <= last):
                raise ValueError("it is no part of this page")
            self._map[at : at + len(octets)] = octets

    def raw_beat(self) -> bytes:
        """The bytes of the heartbeat, for a copy of this page."""
        raw: bytes = self._at(_BEAT_AT, _BEAT)
        return raw

    def put_beat(self, raw: bytes) -> None:
        """Write the heartbeat that :meth:`raw_beat` returned for the page that this is a copy of.

        Raises:
            ValueError: it is none.
        """
        if len(raw) != _BEAT.size:
            raise ValueError("it is no heartbeat")
        self._map[_BEAT_AT : _BEAT_AT + _BEAT.size] = raw

    def beat(self, step: int, epoch: int, batch: int, phase: Phase) -> None:
        """Write the progress. The first heartbeat of a new step is its commit."""
        now = monotonic_ns()
        if step != self._step:
            self._note(step, now)
        _BEAT.pack_into(self._map, _BEAT_AT, step, epoch, batch, now, phase)

    def enter(self, phase: Phase) -> None:
        """Write the phase; the rest of the heartbeat stays."""
        now = monotonic_ns()
        self._spent[self._phase] += now - self._since
        self._phase, self._since = phase, now
        beat = self._beat
        beat[_AT] = now
        beat[_PHASE] = phase

    def _note(self, step: int, now: int) -> None:
        """Write the pace of a step that is committed now, if its begin was seen."""
        spent, self._spent = self._spent, [0, 0, 0, 0, 0, 0]  # by phase
        spent[self._phase] += now - self._since
        self._since = now
        if step == self._step + 1:
            if self._committed:
                paces, at = self._paces, step % PACES * 4
                paces[at] = 0  # a writer that is killed in the middle leaves no pace
                paces[at + 1] = now - self._committed
                paces[at + 2] = spent[_BACKWARD]
                paces[at + 3] = spent[_IDLE] + spent[_UPDATED]
                paces[at] = step
            self._committed = now
        else:
            self._committed = 0
        self._step = step

    def paces(self) -> list[Pace]:
        """The paces of the last steps, oldest first; one that is being written is left out."""
        octets, again = self._map[_PACES_AT:_TEXT_AT], self._map[_PACES_AT:_TEXT_AT]
        found = [
            Pace(*pace)
            for slot, pace in enumerate(_PACE.iter_unpack(octets))
            if pace[0] and pace[0] % PACES == slot
        ]
        if octets != again:
            later = {*_PACE.iter_unpack(again)}
            found = [pace for pace in found if pace in later]
        found.sort()
        return [pace for pace in found if pace.step > found[-1].step - PACES]

    def continue_from(self, old: Page) -> None:
        """Replace another page: take its heartbeat and paces; the present step will have none."""
        self._map[_BEAT_AT:_TEXT_AT] = old._map[_BEAT_AT:_TEXT_AT]
        self._step, self._phase = old._step, old._phase

    def heartbeat(self, behind_ns: int = 0) -> Heartbeat:
        """The rank's progress; ``behind_ns``: so much its clock is behind that of the reader."""
        octets = self._map[_BEAT_AT : _BEAT_AT + _BEAT.size]
        step, epoch, batch, at_ns, phase = _BEAT.unpack(octets)
        return Heartbeat(step, epoch, batch, at_ns + behind_ns, Phase(phase))

    def write(
        self,
        step: int,
        epoch: int,
        batch: int,
        meta: bytes,
        fill: Callable[[int], None],
        seen: Callable[[int], None] | None = None,
        *,
        is_commit: bool,
    ) -> None:
        """Write the record of a commit, or of the step in progress.

        Args:
            step: global step, counted from 1.
            batch: batches consumed in this epoch.
            fill: called with the address to which it writes the payload.
            seen: called with the same once it is written, but does not count yet: it does from
                then on, be this done, or raise what it may.
            is_commit: whether the step is committed.

        Raises:
            ValueError: ``meta`` is larger than the page has room for.
        """
        if len(meta) > self._meta_bytes:
            raise ValueError(f"{len(meta)} bytes of JSON, room for {self._meta_bytes}")
        slot = self.slot(step, is_commit=is_commit)
        at = self._records_at + slot * self._record_bytes
        self._number += 1
        end = at + self._record_bytes - _END.size
        _END.pack_into(self._map, end, 0)
        now = monotonic_ns()
        _RECORD.pack_into(self._map, at, self._number, step, epoch, batch, len(meta), now)
        at += _RECORD.size
        if self._metas.get(slot) is not meta:  # otherwise it is there already
            self._map[at : at + len(meta)] = meta
            self._metas[slot] = meta
        fill(self._address + at + self._meta_bytes)
        try:
            if seen is not None:
                seen(self._address + at + self._meta_bytes)
        finally:
            _END.pack_into(self._map, end, self._number)

    def complete(self, step: int) -> None:
        """Make the record of a commit count, whose writer has ended, and had written all of it."""
        at = self._records_at + self.slot(step, is_commit=True) * self._record_bytes
        number, of, *_ = _RECORD.unpack(self._at(at, _RECORD))
        if of == step:
            end = at + self._record_bytes
            self._map[end - _END.size : end] = _END.pack(number)

    def slot(self, step: int, *, is_commit: bool) -> int:
        """Which record of the page is that of a step."""
        return self._commits[step % len(self._commits)] if is_commit else UNDER_WAY

    @property
    def memory(self) -> tuple[int, int]:
        """The address of the page, and its size."""
        return self._address, len(self._map)

    def device_area(self, step: int, *, is_commit: bool) -> DeviceArea:
        """Where a device writes its buffers as of a commit, or of the step in progress."""
        slot = step % 2 + 2 * (not is_commit)
        at = self._address + self._area_at(slot)
        octets = at + _STAMP_ROOM
        return DeviceArea(slot, at, octets, octets + _aligned(self.device_bytes))

    def write_device(self, step: int, turn: int, octets: bytes, *, is_commit: bool) -> None:
        """Write such an area from here. No device may have yet to write to it."""
        slot = step % 2 + 2 * (not is_commit)
        at = self._area_at(slot)
        _STAMP.pack_into(self._map, at, stamp(step, turn))
        self._map[at + _STAMP_ROOM : at + _STAMP_ROOM + self.device_bytes] = octets
        _STAMP.pack_into(self._map, self._end_at(slot), stamp(step, turn))

    def device_part(
        self, step: int, *, is_commit: bool, start: int = 0, stop: int | None = None
    ) -> bytes | None:
        """The bytes that a device has written, as of a commit, or of the step in progress.

        ``start``: the first byte that is wanted. ``stop``: the byte behind the last one.

        Returns:
            ``None``: the device has not come to it, or has gone on.
        """
        slot = step % 2 + 2 * (not is_commit)
        begin, at, end = self._area_at(slot), self._area_at(slot) + _STAMP_ROOM, self._end_at(slot)
        (seen,) = _STAMP.unpack(self._at(end, _STAMP))  # the last one first: it is written last
        stop = self.device_bytes if stop is None else min(stop, self.device_bytes)
        octets = self._map[at + start : at + stop]
        (first,) = _STAMP.unpack(self._at(begin, _STAMP))
        return octets if first == seen != 0 and seen // _TURNS == step else None

    def record(self, step: int) -> CommitRecord | None:
        """The private state as of ``step``: from its commit, else from the step in progress."""
        for slot in (self.slot(step, is_commit=True), UNDER_WAY):
            found = self._read(slot)
            if found is not None and found.step == step:
                return found
        return None

    def position(self, step: int) -> tuple[int, int] | None:
        """Epoch and batch of ``step``, also while a device has yet to write its buffers."""
        heads = (self._head(slot) for slot in (self.slot(step, is_commit=True), UNDER_WAY))
        return next((head[2:4] for head in heads if head is not None and head[1] == step), None)

    def newest_step(self) -> int | None:
        """The step of the newest commit, without its payload."""
        found = self.newest_commit()
        return None if found is None else found[0]

    def newest_commit(self) -> tuple[int, int] | None:
        """The step of the newest commit, and when it was made, in monotonic ns."""
        heads = (self._head(slot) for slot in self._commits)
        return max(((head[1], head[5]) for head in heads if head is not None), default=None)

    def newest(self) -> CommitRecord | None:
        """The newest commit."""
        found = [record for slot in self._commits if (record := self._read(slot)) is not None]
        return max(found, key=lambda record: record.step, default=None)

    def records(self) -> list[CommitRecord]:
        """All that is valid: the last commits, and the step in progress."""
        return [found for slot in self._slots if (found := self._read(slot)) is not None]

    def _area_at(self, slot: int) -> int:
        return self._areas_at + slot * _area_bytes(self.device_bytes)

    def _end_at(self, slot: int) -> int:
        return self._area_at(slot) + _STAMP_ROOM + _aligned(self.device_bytes)

    def _head(self, slot: int) -> tuple[int, int, int, int, int, int] | None:
        """Number, step, epoch, batch, meta bytes and time of a valid record."""
        at = self._records_at + slot * self._record_bytes
        head: tuple[int, int, int, int, int, int] = _RECORD.unpack(self._at(at, _RECORD))
        (end,) = _END.unpack(self._at(at + self._record_bytes - _END.size, _END))
        return head if 0 != head[0] == end and head[4] <= self._meta_bytes else None

    def _read(self, slot: int) -> CommitRecord | None:
        head = self._head(slot)
        if head is None:
            return None
        _, step, epoch, batch, size, at_ns = head
        at = self._records_at + slot * self._record_bytes + _RECORD.size
        meta = self._map[at : at + size]
        at += self._meta_bytes
        payload = self._map[at : at + self._payload_bytes]
        is_commit = slot != UNDER_WAY
        record = CommitRecord(step, epoch, batch, at_ns, meta, payload, is_commit)
        return self._with_device_part(record) if self.device_bytes else record

    def _with_device_part(self, record: CommitRecord) -> CommitRecord | None:
        """The record with what a device has written as of its step, in either of two areas."""
        for is_commit in (record.is_commit, not record.is_commit):
            part = self.device_part(record.step, is_commit=is_commit)
            if part is not None:
                return record._replace(
                    payload=record.payload + part, has_early_buffers=not is_commit
                )
        return None


def create(
    rank: int,
    attempt: int,
    entries: Sequence[Entry],
    meta_bytes: int = META_BYTES,
    *,
    device_bytes: int = 0,
    runs_ahead: bool = False,
) -> int:
    """Make a page in anonymous shared memory; return its file descriptor.

    Args:
        entries: what a record's payload holds.
        meta_bytes: room for a record's JSON.
        device_bytes: so many of a payload, at its end, are written by a device.
        runs_ahead: the state is on a device, which lags behind the commits by up to one step. So
            its peers may have to repeat a step that is one commit older.

    Raises:
        OSError: no memory or no descriptor is left.
    """
    text = json.dumps(entries).encode()
    meta_bytes = _aligned(meta_bytes)
    payload = sum(entry.nbytes for entry in entries) - device_bytes
    record = _aligned(_RECORD.size + meta_bytes + payload) + _END.size
    size = _aligned(_TEXT_AT + len(text)) + (_RECORDS + runs_ahead) * record
    if device_bytes:
        size = _aligned(size) + _AREAS * _area_bytes(device_bytes)
    fd = os.memfd_create(f"msrun-page-{rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # reading a page that is cut short would kill the agent with SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        os.pwrite(fd, _HEAD.pack(MAGIC, rank, attempt, len(text), record, meta_bytes), 0)
        os.pwrite(fd, _DEVICE.pack(device_bytes, runs_ahead), _DEVICE_AT)
        os.pwrite(fd, text, _TEXT_AT)
    except BaseException:
        os.close(fd)
        raise
    return fd


@lru_cache(maxsize=64)
def _described(text: bytes) -> tuple[tuple[Entry, ...], int]:
    """What the JSON of a page says of its payload, and its bytes: most ranks say the same."""
    entries = tuple(Entry(n, d, tuple(s), b) for n, d, s, b in json.loads(text))
    return entries, sum(entry.nbytes for entry in entries)


def _area_bytes(device_bytes: int) -> int:
    return 2 * _STAMP_ROOM + _aligned(device_bytes)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
