"""What the holders of a part said to hold, as digests: the majority is right. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agent.ranks.parts import Groups
from agent.ranks.rank_map import RankMap


class Said(NamedTuple):
    """What the seats of a part said to hold."""

    ranks: tuple[int, ...]  # these seats
    by_digest: Mapping[str, tuple[int, ...]]
    ranked: tuple[str, ...]  # the digests, that of the most ranks first
    is_settled: bool  # that one is right: it is of the majority

    @property
    def wanted(self) -> tuple[str, ...]:
        """What is to be written."""
        return self.ranked[:1] if self.is_settled else self.ranked


def said_by(digests: RankMap[str], group: tuple[int, ...]) -> Said:
    """What these seats have said so far, of all that have."""
    found: dict[str, list[int]] = {}
    for rank in group:
        if (digest := digests.get(rank)) is not None:
            found.setdefault(digest, []).append(rank)
    by_digest = {digest: tuple(ranks) for digest, ranks in found.items()}
    ranked = sorted(by_digest, key=lambda each: (-len(by_digest[each]), by_digest[each][0]))
    count = sum(map(len, by_digest.values()))
    is_settled = bool(ranked) and 2 * len(by_digest[ranked[0]]) > count
    return Said(group, by_digest, tuple(ranked), is_settled)


def of_part(digest: str, seat: int, parts: Groups) -> str:
    """A digest as what the seat's part holds; equal ones of two parts are not one state.

    It leaves out what may differ by rank: an object of the script's, by which ranks were divided.
    """
    if len(parts) == 1:
        return digest
    return f"{digest} of {next(part[0] for part in parts if seat in part)}"


def sides_of(kept: Mapping[str, tuple[int, ...]], found: Sequence[Said]) -> Groups:
    """By variant the seats whose state it is; none: there is but one, of all ranks."""
    if len(found) == 1 and found[0].is_settled:
        return ()
    sides = []
    for digest, ranks in kept.items():
        of = [said.ranks for said in found if said.is_settled and said.ranked[0] == digest]
        sides.append(tuple(sorted(rank for group in of for rank in group)) or ranks)
    return tuple(sides) if len(sides) > 1 or any(not said.is_settled for said in found) else ()
