"""What the ranks that save without msrun have written between them, and whether that is the state.

Each rank knows the ranks that hold the same as itself: its replica group. Of each group one rank
writes, all digest what they hold, and an odd replica is outvoted by its group.

Where no rank is a replica of a dead one, others may hold all of it between them, each a part. Then
each part of the state is written once, by one of those that hold it alike. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from worker_hooks.contract.protocol import Digested, Written
from worker_hooks.recovery.peer_notes import PeerNote
from worker_hooks.storage.manifest import REPLICATED, Shard

Groups = tuple[tuple[int, ...], ...]


class JointState(NamedTuple):
    """The state as the files of several ranks have it."""

    shards: tuple[Shard, ...] = ()
    holders: Groups = ()  # of each file's part; none: there is one, of all ranks
    digest: str = ""
    odd: tuple[int, ...] = ()  # ranks whose state is not that of their group
    why_not: str = ""  # it is not the state of all ranks; the rest is empty then


def is_writer(
    rank: int, leader: int, notes: Mapping[int, PeerNote], part: tuple[int, ...] = ()
) -> bool:
    """Whether a rank writes what its group holds: the leader's group has the leader for that.

    Args:
        notes: of all ranks that are there.
        part: the ranks that hold what is to be written; none: the group.
    """
    group = part or next((each for each in groups_of(notes) if rank in each), ())
    if not group or leader in group:
        return rank == leader
    return rank == min(_able(leader, notes).keys() & group, default=rank)


def _able(leader: int, notes: Mapping[int, PeerNote]) -> dict[int, PeerNote]:
    """The ranks that can write what the leader saves."""
    step = notes[leader].step
    return {
        rank: note
        for rank, note in notes.items()
        if note.is_whole and note.step == step and not note.is_memory
    }


def parts_to_write(leader: int, notes: Mapping[int, PeerNote]) -> Groups:
    """The parts of the state by who holds them, if ranks hold all parts, but not all groups' state.

    None: no parts are known, or one has no holder left, or each group has one.
    """
    able = _able(leader, notes)
    parts = sorted({part for note in able.values() for part in note.parts})
    held = {rank for group in groups_of(notes) if able.keys() & group for rank in group}
    is_all = bool(notes[leader].parts) and len(parts) == notes[leader].total
    return tuple(parts) if is_all and not held.issuperset(chain(*parts)) else ()


def joined(
    answers: Mapping[int, PeerNote], leader: int, count: int, why_unknown: str = ""
) -> JointState:
    """What the answers make up.

    Args:
        answers: the notes of the ranks that have written or digested, the leader's included.
        leader: the rank that completes the dump.
        why_unknown: why the leader does not know who holds the same. If nobody does, all ranks must
            have answered, and hold the same.
    """
    told = {rank: note for rank, note in answers.items() if note.digest}
    groups = groups_of(told)
    if why_unknown and not groups:
        if len({note.digest for note in told.values()}) > 1:
            return JointState(why_not=f"the ranks hold different states: {why_unknown}")
        if lost := sorted({*range(count)} - told.keys()):
            return JointState(why_not=_nobody(lost, why_unknown))
    groups = groups or [tuple(range(count))]
    if lost := sorted({*range(count)}.difference(*groups)):
        return JointState(why_not=_nobody(lost, "no rank that holds the same has answered"))
    if sum(map(len, groups)) > count:
        return JointState(why_not="the ranks disagree about who holds the same")
    return _made_up([(group, told) for group in groups], leader)


def joined_parts(answers: Mapping[int, PeerNote], leader: int, parts: Groups) -> JointState:
    """What the answers make up where each part was written once.

    ``parts``: as :func:`parts_to_write` returned them.
    """
    found = []
    for part in parts:
        told = dict[int, PeerNote]()
        for rank in part:
            note = answers.get(rank)
            if note is not None and note.shares and part in note.parts:
                digest, written = note.shares[note.parts.index(part)]
                told[rank] = note._replace(digest=digest, written=written)
        found.append((part, told))
    return _made_up(found, leader)


def _made_up(
    found: Sequence[tuple[tuple[int, ...], Mapping[int, PeerNote]]], leader: int
) -> JointState:
    """The state of all of these; each group with the notes that tell of what it holds."""
    shards, odd, digests = list[Shard](), set[int](), list[str]()
    for number, (group, told) in enumerate(found):
        if why := next(_problems(group, told, leader), ""):
            return JointState(why_not=why)
        shard = next(_written(group, told, leader))
        shards.append(shard._replace(variant=number))
        digests.append(told[shard.rank].digest)
        odd.update(rank for rank in group if rank in told and told[rank].digest != digests[-1])
    holders = tuple(group for group, _ in found)
    return JointState(
        tuple(shards), holders if len(found) > 1 else (), digests[0], tuple(sorted(odd))
    )


def groups_of(notes: Mapping[int, PeerNote]) -> list[tuple[int, ...]]:
    """The replica groups, as those ranks say that know them; none: nobody does.

    A new rank may not have been told yet: it is in the group that names it, else alone.
    """
    known = {tuple(sorted(note.alike)) for note in notes.values() if note.alike}
    if not known:
        return []
    lone = {(rank,) for rank in notes if not any(rank in each for each in known)}
    return sorted(known | lone)


def _problems(group: tuple[int, ...], told: Mapping[int, PeerNote], leader: int) -> Iterator[str]:
    """Why a group's state is not there, or is not to be believed."""
    digests = Counter(told[rank].digest for rank in group if rank in told)
    shard = next(_written(group, told, leader), None)
    common, most = next(iter(digests.most_common(1)), ("", 0))
    if len(digests) > 1 and 2 * most <= digests.total():
        yield "the ranks hold different states, and msrun is gone"
    elif shard is None:
        yield _nobody(list(group), "the rank that was to write it gave no sign")
    elif told[shard.rank].digest != common:
        yield f"rank {shard.rank} differs from most replicas"


def _written(group: tuple[int, ...], told: Mapping[int, PeerNote], leader: int) -> Iterator[Shard]:
    """The files with a group's state: the leader's, else that of the lowest rank."""
    for rank in sorted(group, key=lambda rank: (rank != leader, rank)):
        if rank in told and (found := told[rank].written) is not None:
            yield Shard(**found)


def _nobody(ranks: list[int], why: str) -> str:
    return f"nobody saves the state of rank {', '.join(map(str, ranks))}: {why}"


def shard_of(answer: Written | Digested) -> dict[str, object] | None:
    """The file that a rank has written, for its note."""
    if not isinstance(answer, Written):
        return None
    shard = Shard(answer.file, answer.rank, REPLICATED, answer.nbytes, answer.sha256)
    return shard._asdict()
