"""A dump in memory that nodes have between them: each may have a part of the state.

While ranks are replaced, that dump is what all resume from. If node 0 is lost, the rank that leads
writes what its node has of it, and asks others for what it lacks. So it counts as soon as one rank
was told to resume from it. Ranks that were not yet, or were told to go on from there, hold their
own state, and write what their node has of the dump if they are asked.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from worker_hooks.contract.atomic_file import FOLDER_MODE
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.recovery.peer_notes import PeerNote
from worker_hooks.storage import safetensors_file
from worker_hooks.storage.manifest import PRIVATE, Manifest, Shard
from worker_hooks.storage.memory_dump import HeldDump


class HeldParts(NamedTuple):
    """Which parts of a dump in memory a node has; for the notes of its ranks."""

    memory: str  # stands for the dump, on all nodes
    total: int  # states that it is made up of
    states: tuple[int, ...]  # those whose tensors are here
    ranks: tuple[tuple[int, int], ...]  # those whose private state is here: first and last

    @classmethod
    def of(cls, manifest: Manifest) -> HeldParts:
        """Those of a manifest in memory."""
        name = f"{manifest.attempt} {manifest.step} {manifest.digest}"
        total = max(len(manifest.holders), 1)
        return cls(
            hashlib.sha256(name.encode()).hexdigest(),
            total,
            tuple(sorted({*range(total)}.difference(manifest.absent))),
            _ranges(shard.rank for shard in manifest.shards if shard.kind == PRIVATE),
        )


class PartRequest(NamedTuple):
    """What a leader asks another rank to write."""

    rank: int
    states: Sequence[int]
    private: Sequence[int]  # ranks whose private state it is


def complete(notes: Mapping[int, PeerNote]) -> set[str]:
    """The dumps that count, and of which nodes have all states between them, as their ranks say."""
    found, totals = defaultdict[str, set[int]](set), dict[str, int]()
    for note in notes.values():
        if note.memory:
            found[note.memory].update(note.states)
        if note.is_memory:
            totals[note.memory] = note.total
    return {memory for memory, total in totals.items() if len(found[memory]) == total}


def requests(leader: int, notes: Mapping[int, PeerNote]) -> tuple[PartRequest, ...]:
    """What a leader lacks, by who is to write it.

    A rank writes its own private state if its node has that: each node writes its ranks' then.

    ``notes``: of the ranks that can be asked, and of the leader.
    """
    mine = notes[leader]
    others = {
        rank: note
        for rank, note in sorted(notes.items())
        if rank != leader and note.memory == mine.memory
    }
    lacking, known = {*range(mine.total)} - {*mine.states}, _ranks(mine.ranks)
    states, private = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for rank, note in others.items():
        if came := lacking & {*note.states}:
            states[rank] = sorted(came)
            lacking -= came
    has = {rank: _ranks(note.ranks) for rank, note in others.items()}
    for rank in (each for each in has if each in has[each] and each not in known):
        private[rank].append(rank)
        known.add(rank)
    for rank, there in has.items():
        if came := there - known:
            private[rank] += sorted(came)
            known |= came
    return tuple(
        PartRequest(rank, states[rank], private[rank])
        for rank in sorted(states.keys() | private.keys())
    )


def own(rank: int, note: PeerNote) -> PartRequest:
    """All that a rank's node has."""
    return PartRequest(rank, note.states, sorted(_ranks(note.ranks)))


def write(
    held: HeldDump, wanted: PartRequest, folder: Path, advance: Callable[[int], None]
) -> tuple[Shard, ...]:
    """Write parts of the dump; files with states are named after the rank that does.

    Ranks of other nodes write to that folder, too: what is the same state was written to memory by
    other ranks there.

    Raises:
        OSError: it cannot be read, or the folder cannot be written to.
    """
    return tuple(_written(held, wanted, folder, advance))


def _written(
    held: HeldDump, wanted: PartRequest, folder: Path, advance: Callable[[int], None]
) -> Iterator[Shard]:
    about, share = held.manifest, 0
    states, private = {*wanted.states}, {*wanted.private}
    for number, shard in enumerate(about.shards):
        is_private = shard.kind == PRIVATE
        if shard.rank not in private if is_private else shard.variant not in states:
            continue
        found, head, tensors = held.file(number)
        if not is_private:
            name = DumpLayout.shard(wanted.rank, about.epoch + 1, about.batch, share)
            found, share = found._replace(file=name), share + 1
        path = folder / found.file
        path.parent.mkdir(FOLDER_MODE, exist_ok=True)
        done = safetensors_file.write(path, head, tensors, advance)
        yield found._replace(nbytes=done.nbytes, sha256=done.sha256)


def lacking(note: PeerNote, written: Collection[Shard]) -> list[int]:
    """The states of a dump in memory of which these files have nothing."""
    there = {shard.variant for shard in written if shard.kind != PRIVATE}
    return sorted({*range(note.total)} - there)


def _ranges(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    found = list[tuple[int, int]]()
    for rank in sorted({*ranks}):
        if found and found[-1][1] == rank - 1:
            found[-1] = found[-1][0], rank
        else:
            found.append((rank, rank))
    return tuple(found)


def _ranks(ranges: Iterable[Sequence[int]]) -> set[int]:
    return {rank for first, last in ranges for rank in range(first, last + 1)}
