"""Which ranks hold which part of a state, where a rank may hold some parts with these ranks and
others with those. Pure.

Nobody says what the parts are. Ranks compare the texts of their tensors, and each tensor divides
them into *blocks* that hold the same of it. A part is what all ranks of a block hold, for the
smallest blocks: any larger one has such a rank, too. So each tensor of each rank is in a part, and
there are about as many parts as the layout of the model has kinds of replicas, not as it has
tensors.

In most jobs ranks that share one tensor share all of them: then the parts are the replica groups,
and a rank is in one. Else it is in several, and what is ordered of one of them is ordered of a
*seat*: the rank's number plus the count of ranks for each of its earlier parts. So the seats of all
parts are different numbers, and those of a rank's first part are the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from agent.ranks.rank_set import RankSet

Groups = tuple[tuple[int, ...], ...]

MOST_KINDS = 64  # of tensors by how they divide the ranks; with more, replica groups stay whole


class Part(NamedTuple):
    """What some ranks hold all alike."""

    ranks: tuple[int, ...]
    without: tuple[str, ...] = ()  # names of what they hold besides, with other ranks or alone


class Parts(NamedTuple):
    """The parts of a state; none: all ranks hold the same, or nobody knows."""

    every: tuple[Part, ...] = ()
    seats: Groups = ()  # of each part, in its ranks' order
    size: int = 1  # how many ranks there are
    taken: RankSet = RankSet()  # all seats; none: each rank has one

    @property
    def are_shared(self) -> bool:
        """Whether a rank is in several of them."""
        return bool(self.taken)

    def seat(self, rank: int, share: int) -> int:
        """The seat in a part of which the rank holds ``share`` others before it."""
        return rank + self.size * share if self.taken else rank

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """The seats that a rank has."""
        if not self.taken:
            return (rank,)
        top = self.taken.bits.bit_length()
        return tuple(seat for seat in range(rank, top, self.size) if seat in self.taken)

    def of_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The seats that these ranks have, rank by rank."""
        return tuple(chain.from_iterable(map(self.of_rank, ranks)) if self.taken else ranks)

    def without(self) -> dict[int, tuple[str, ...]]:
        """By seat what its rank holds besides the part."""
        pairs = zip(self.every, self.seats, strict=True)
        return {seat: part.without for part, seats in pairs for seat in seats}

    def owner_of(self, seat: int) -> tuple[int, int]:
        """Whose seat it is, and of how many parts before this one that rank has one."""
        share, rank = divmod(seat, self.size) if self.taken else (0, seat)
        return rank, share

    def ranks_of(self, seats: Iterable[int]) -> tuple[int, ...]:
        """Whose seats these are, each rank once, in the seats' order."""
        return tuple(dict.fromkeys(map(self.rank_of, seats) if self.taken else seats))

    def rank_of(self, seat: int) -> int:
        """Whose seat it is."""
        return seat % self.size if self.taken else seat


def parts_of(
    count: int, groups: Groups, cuts: Mapping[str, Groups], values: Collection[str] = ()
) -> Parts:
    """The parts of a state.

    Args:
        groups: ranks that hold the same of everything; none: all do.
        cuts: the names of what not all ranks hold the same, with the ranks that do.
        values: those names of which nothing can be left out, as they are no tensors.
    """
    if not groups:
        return Parts()
    kinds: dict[Groups, list[str]] = {}
    for name, blocks in cuts.items():
        kinds.setdefault(blocks, []).append(name)
    found = _smallest(groups, kinds) if len(kinds) <= MOST_KINDS else ()
    if any(name in values for part in found for name in part.without):
        found = ()
    return seated(count, found or tuple(map(Part, groups)))


def _smallest(groups: Groups, kinds: Mapping[Groups, Sequence[str]]) -> tuple[Part, ...]:
    """The blocks that are the smallest ones of some rank."""
    at = [_block_by_rank(blocks) for blocks in kinds]
    found = set[tuple[int, ...]]()
    for group in groups:
        smallest: list[RankSet] = []
        for block in sorted((blocks[group[0]] for blocks in at), key=len):
            if not any(other <= block for other in smallest):
                smallest.append(block)
        found.update(map(tuple, smallest))
    parts = []
    for ranks in sorted(found):
        pairs = zip(kinds.values(), at, strict=True)
        cut = (names for names, blocks in pairs if not blocks[ranks[0]] >= RankSet(ranks))
        parts.append(Part(ranks, tuple(sorted(chain.from_iterable(cut)))))
    return tuple(parts)


def _block_by_rank(blocks: Groups) -> dict[int, RankSet]:
    return {rank: one for block in blocks for one in [RankSet(block)] for rank in block}


def seated(count: int, every: Sequence[Part]) -> Parts:
    """Some parts of a state that ``count`` ranks hold."""
    had = dict.fromkeys(range(count), 0)
    seats = []
    for part in every:
        seats.append(tuple(rank + count * had[rank] for rank in part.ranks))
        for rank in part.ranks:
            had[rank] += 1
    taken = RankSet(chain.from_iterable(seats)) if max(had.values()) > 1 else RankSet()
    return Parts(tuple(every), tuple(seats), count, taken)
