"""What the ranks that save without msrun have written between them, and whether that is the state.

Each rank knows the ranks that hold the same as itself: its replica group. Of each group one rank
writes, all digest what they hold, and an odd replica is outvoted by its group. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
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


def is_writer(rank: int, leader: int, notes: Mapping[int, PeerNote]) -> bool:
    """Whether a rank writes what its group holds: the leader's group has the leader for that.

    ``notes``: of all ranks that are there.
    """
    group = next((each for each in groups_of(notes) if rank in each), ())
    if not group or leader in group:
        return rank == leader
    step = notes[leader].step
    able = {
        other
        for other, note in notes.items()
        if note.is_whole and note.step == step and not note.is_memory
    }
    return rank == min(able.intersection(group), default=rank)


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
    if why := next(_problems(groups, told, leader), ""):
        return JointState(why_not=why)
    written = [next(_written(group, told, leader)) for group in groups]
    pairs = zip(groups, written, strict=True)
    right = {rank: told[shard.rank].digest for group, shard in pairs for rank in group}
    return JointState(
        tuple(shard._replace(variant=number) for number, shard in enumerate(written)),
        tuple(groups) if len(groups) > 1 else (),
        told[written[0].rank].digest,
        tuple(rank for rank, note in sorted(told.items()) if note.digest != right[rank]),
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


def _problems(
    groups: Collection[tuple[int, ...]], told: Mapping[int, PeerNote], leader: int
) -> Iterator[str]:
    """Why some group's state is not there, or is not to be believed."""
    for group in groups:
        digests = Counter(told[rank].digest for rank in group if rank in told)
        (common, most), total = digests.most_common(1)[0], digests.total()
        shard = next(_written(group, told, leader), None)
        if len(digests) > 1 and 2 * most <= total:
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
