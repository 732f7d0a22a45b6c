"""What the holders of a part said to hold, as digests: the majority is right. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from agent.ranks.parts import Groups
from agent.ranks.rank_map import RankMap


class Said(NamedTuple):
    """What the seats of a part said to hold."""

    ranks: tuple[int, ...]  # these seats
    by_digest: Mapping[str, tuple[int, ...]]
    ranked: tuple[str, ...]  # the digests, that of the most ranks first
    is_settled: bool  # that one is right: it is of the majority
    written: Mapping[str, tuple[int, ...]]  # those of the digests that are, and by whom

    @property
    def wanted(self) -> tuple[str, ...]:
        """What is to be written."""
        return self.ranked[:1] if self.is_settled else self.ranked


class States(NamedTuple):
    """Which states the seats said to hold, and which of these are written.

    A digest leaves out what may differ by rank: an object of the script's, by which ranks were
    divided. So equal ones of two parts are not one state.
    """

    by_seat: Mapping[int, str]  # digests, each as that of what the seat's part holds
    written: Mapping[str, tuple[int, ...]]  # by whom

    def has_written(self, seats: Iterable[int]) -> bool:
        """Whether what one of these holds is written."""
        return any(self.by_seat.get(seat) in self.written for seat in seats)


def states_of(digests: RankMap[str], writers: Groups, parts: Groups) -> States:
    """What the digests say, as far as is known by now which seats share a part.

    Args:
        digests: by seat.
        writers: who wrote together, to the end; of two parts they wrote neither's state.
        parts: the seats of each.
    """
    by_seat: Mapping[int, str] = digests
    if len(parts) > 1:
        by_seat = {
            seat: f"{digests[seat]} of {part[0]}"
            for part in parts
            for seat in part
            if seat in digests
        }
    found = {by_seat[alike[0]]: alike for alike in writers if len({*map(by_seat.get, alike)}) == 1}
    return States(by_seat, found)


def said_by(states: States, group: tuple[int, ...]) -> Said:
    """What these seats have said so far, of all that have."""
    found: dict[str, list[int]] = {}
    for rank in group:
        if (digest := states.by_seat.get(rank)) is not None:
            found.setdefault(digest, []).append(rank)
    by_digest = {digest: tuple(ranks) for digest, ranks in found.items()}
    ranked = sorted(by_digest, key=lambda each: (-len(by_digest[each]), by_digest[each][0]))
    count = sum(map(len, by_digest.values()))
    is_settled = bool(ranked) and 2 * len(by_digest[ranked[0]]) > count
    written = {digest: states.written[digest] for digest in ranked if digest in states.written}
    return Said(group, by_digest, tuple(ranked), is_settled, written)


def sides_of(kept: Mapping[str, tuple[int, ...]], found: Sequence[Said]) -> Groups:
    """By variant the seats whose state it is; none: there is but one, of all ranks."""
    if len(found) == 1 and found[0].is_settled:
        return ()
    sides = []
    for digest, ranks in kept.items():
        of = [said.ranks for said in found if said.is_settled and said.ranked[0] == digest]
        sides.append(tuple(sorted(rank for group in of for rank in group)) or ranks)
    return tuple(sides) if len(sides) > 1 or any(not said.is_settled for said in found) else ()
