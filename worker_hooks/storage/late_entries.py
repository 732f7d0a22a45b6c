"""Randomness and buffers of a rank that died before its commit, where its peers reached it.

The page of such a rank has its generators and its buffers as its last backward began. If the peers
have drawn since then (noise on gradients or weights, the base seed of a validation's loader), or
have changed a buffer (an average of statistics, a counter), so would it have. If all of them had
the same before, and the peers still have, then its own would be the same now. Otherwise nobody
knows it, and the step cannot be continued bit for bit.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from worker_hooks.contract.status_page import (
    BEFORE,
    LATE_BUFFERS,
    LATE_BYTES,
    RANDOMNESS,
    CommitRecord,
    Entry,
    LateDraws,
)


class UnknownStateError(Exception):
    """A dead rank's private state at the step to save cannot be known; the message says why."""


class _Generator(NamedTuple):
    """One random generator of one rank, in the record of a step."""

    at: int  # where its state is in the payload
    state: bytes
    late: LateDraws

    @property
    def before(self) -> int:
        """A checksum of its state as backward began."""
        return self.late.crc if self.late.has_moved else zlib.crc32(self.state)


class _Buffers(NamedTuple):
    """The buffers of one rank, in the record of a step."""

    payload: bytes
    places: Mapping[str, tuple[int, int]]  # where each begins and ends there
    late: frozenset[str]  # were ever changed between backward and commit
    moved: frozenset[str]  # may have been in this step

    def get(self, name: str) -> bytes | None:
        """The content of a buffer; ``None``: it is not known."""
        return self.payload[slice(*self.places[name])] if name in self.places else None


def completed(
    records: Mapping[int, CommitRecord],
    earlier: Callable[[int, int], CommitRecord | None],
    entries: Mapping[int, Sequence[Entry]],
    step: int,
) -> dict[int, CommitRecord]:
    """The records with the randomness and the buffers of all ranks as of the commit of ``step``.

    Args:
        records: by rank; that of a rank that died before the commit is not one of a commit.
        earlier: returns a rank's record of an earlier commit, if it is still there.
        entries: by rank: what the payload of its record holds.
        step: those of another step stay as they are.

    Raises:
        UnknownStateError: some rank's cannot be known.
    """
    present = {rank: one for rank, one in records.items() if one.step == step}
    there = {rank for rank, one in present.items() if one.is_commit}
    behind = present.keys() - there
    if not behind:
        return dict(records)
    found = dict(records)

    def who(rank: int) -> str:
        return f"rank {rank} did not reach the commit of step {step}"

    if there:
        generators = {rank: _generators(one, entries[rank]) for rank, one in present.items()}
        peers = [generators[rank] for rank in there]
        for rank in behind:
            changes = _late_states(who(rank), generators[rank], peers)
            found[rank] = _changed(found[rank], changes)
    # who has made all changes of its step behind its update has changed its buffers, too
    there |= {rank for rank in behind if _is_settled(present[rank])}
    olds = [_buffers(earlier(rank, step - 1), entries[rank]) for rank in there]
    news = [_buffers(present[rank], entries[rank]) for rank in there]
    if not there:
        return found
    for rank in present.keys() - there:
        mine = _buffers(present[rank], entries[rank])
        before = [_buffers(earlier(rank, step - back), entries[rank]) for back in (1, 2)]
        changes = _late_buffers(who(rank), mine, before, olds, news)
        found[rank] = _changed(found[rank], changes)
    return found


def _changed(record: CommitRecord, changes: Iterable[tuple[int, bytes]]) -> CommitRecord:
    """With these bytes at these places of its payload."""
    payload = bytearray(record.payload)
    for at, octets in changes:
        payload[at : at + len(octets)] = octets
    return record._replace(payload=bytes(payload))


# --- randomness ---------------------------------------------------------------------------------


def _late_states(
    who: str, mine: Mapping[str, _Generator], peers: Sequence[Mapping[str, _Generator]]
) -> Iterable[tuple[int, bytes]]:
    """Where in the payload which states of generators belong.

    ``who``: tells which rank did not reach which commit.
    """
    for name, one in mine.items():
        state = _state(one, [each[name] for each in peers if name in each])
        if state is None:
            raise UnknownStateError(
                f"{who}, random numbers are drawn between backward and the commit ({name}), and "
                "what it would have drawn cannot be told from the others: draw before backward, "
                "or from one seed"
            )
        yield one.at, state


def _state(mine: _Generator, peers: Sequence[_Generator]) -> bytes | None:
    """The state of a generator at the commit; ``None``: it cannot be known."""
    if not any(peer.late.has_moved for peer in peers):
        is_alone = mine.late.was_late and not any(peer.late.was_late for peer in peers)
        return None if is_alone else mine.state
    befores = {mine.before, *(peer.before for peer in peers)}
    states = {peer.state for peer in peers}
    is_known = len(befores) == len(states) == 1 and len(peers[0].state) == len(mine.state)
    return peers[0].state if is_known else None


def _generators(record: CommitRecord, entries: Sequence[Entry]) -> dict[str, _Generator]:
    """A rank's generators by name."""
    places, found = _places(entries), {}
    for name, (start, stop) in places.items():
        first, last = places.get(BEFORE + name, (0, 0))
        if name.startswith(RANDOMNESS) and last - first == LATE_BYTES:
            late = LateDraws.unpack(record.payload[first:last])
            found[name] = _Generator(start, record.payload[start:stop], late)
    return found


# --- buffers ------------------------------------------------------------------------------------


def _late_buffers(
    who: str,
    mine: _Buffers,
    before: Sequence[_Buffers],
    olds: Sequence[_Buffers],
    news: Sequence[_Buffers],
) -> Iterable[tuple[int, bytes]]:
    """Where in the payload which contents of buffers belong.

    Args:
        who: tells which rank did not reach which commit.
        mine: that rank's buffers, as its last backward began.
        before: the same as of the two commits before, the newest first.
        olds: of ranks that reached it, as of the commit before.
        news: the same as of the commit.
    """
    for name in sorted(mine.late.union(*(one.late for one in news))):
        if name not in mine.places:
            continue
        had, earlier = (one.get(name) for one in before)
        then, now = ([one.get(name) for one in each] for each in (olds, news))
        is_one = had is not None and {had} == {*then} and len({*now}) == 1
        # one peer alone proves little, unless both had made the same change in the step before
        is_known = is_one and (len(now) > 1 or earlier not in {None, had})
        is_alone = name in mine.late and not any(name in one.late for one in news)
        if is_known and now[0] is not None:
            yield mine.places[name][0], now[0]
        elif is_alone or any(name in one.moved for one in news):
            raise UnknownStateError(
                f"{who}, buffer {name} changes between backward and the commit, and what it would "
                "be cannot be told from the other ranks: change it before backward"
            )


def _buffers(record: CommitRecord | None, entries: Sequence[Entry]) -> _Buffers:
    """Those in host memory; nothing, if there is no record."""
    places = _places(entries)
    start, stop = places.get(LATE_BUFFERS, (0, 0))
    if record is None or start == stop:
        return _Buffers(b"", {}, frozenset(), frozenset())
    names = [entry.name for entry in entries[: stop - start]]
    flags = dict(zip(names, record.payload[start:stop], strict=False))
    late = frozenset(name for name in names if flags.get(name))
    moved = frozenset(name for name in late if flags[name] > 1 or not record.is_commit)
    return _Buffers(record.payload, {name: places[name] for name in names}, late, moved)


def _is_settled(record: CommitRecord) -> bool:
    try:
        return bool(json.loads(record.meta).get("is_settled"))
    except (ValueError, AttributeError, RecursionError):
        return False


def _places(entries: Sequence[Entry]) -> dict[str, tuple[int, int]]:
    """Where in a payload each entry begins and ends."""
    places, at = {}, 0
    for entry in entries:
        places[entry.name] = at, at + entry.nbytes
        at += entry.nbytes
    return places
