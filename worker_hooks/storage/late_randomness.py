"""The randomness of a rank that died before its commit, where its peers reached that commit.

The page of such a rank has its generators as its last backward began. If the peers have drawn from
theirs since then (noise on gradients or weights, the base seed of a validation's loader), so would
it have. If all of them were equal as backward began, and the peers' still are, then its own would
be the same now. Otherwise nobody knows it, and the step cannot be continued bit for bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from worker_hooks.contract.status_page import (
    BEFORE,
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


def completed(
    records: Mapping[int, CommitRecord], entries: Mapping[int, Sequence[Entry]], step: int
) -> dict[int, CommitRecord]:
    """The records with the randomness of all ranks as of the commit of ``step``.

    Args:
        records: by rank; that of a rank that died before the commit is not one of a commit.
        entries: by rank: what the payload of its record holds.
        step: those of another step stay as they are.

    Raises:
        UnknownStateError: some rank's cannot be known.
    """
    present = {rank: one for rank, one in records.items() if one.step == step}
    behind = [rank for rank, one in present.items() if not one.is_commit]
    if not behind or len(behind) == len(present):
        return dict(records)
    generators = {rank: _generators(one, entries[rank]) for rank, one in present.items()}
    found = dict(records)
    for rank in behind:
        payload = bytearray(present[rank].payload)
        for name, mine in generators[rank].items():
            peers = [
                generators[other][name]
                for other in present
                if other not in behind and name in generators[other]
            ]
            state = _state(mine, peers)
            if state is None:
                raise UnknownStateError(
                    f"rank {rank} did not reach the commit of step {step}, random numbers are "
                    f"drawn between backward and the commit ({name}), and what it would have drawn "
                    "cannot be told from the others: draw before backward, or from one seed"
                )
            payload[mine.at : mine.at + len(mine.state)] = state
        found[rank] = present[rank]._replace(payload=bytes(payload))
    return found


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
    places, at = {}, 0
    for entry in entries:
        places[entry.name] = at, at + entry.nbytes
        at += entry.nbytes
    found = {}
    for name, (start, stop) in places.items():
        first, last = places.get(BEFORE + name, (0, 0))
        if name.startswith(RANDOMNESS) and last - first == LATE_BYTES:
            late = LateDraws.unpack(record.payload[first:last])
            found[name] = _Generator(start, record.payload[start:stop], late)
    return found
