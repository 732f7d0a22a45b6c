"""Which ranks have said that they can do something, and why others cannot."""

from __future__ import annotations

from typing import NamedTuple

from agent.ranks.rank_map import RankMap
from agent.ranks.rank_set import RankSet


class Refusals(NamedTuple):
    """What ranks have said; most can, so that only reasons take room."""

    able: RankSet = RankSet()
    reasons: RankMap[str] = RankMap()  # of the others

    @property
    def ranks(self) -> RankSet:
        """All that have said something."""
        return self.able | self.reasons.ranks

    def noted(self, rank: int, why_not: str) -> Refusals:
        """The same once a rank has said this; empty: it can."""
        if why_not:
            return Refusals(self.able - {rank}, self.reasons.set(rank, why_not))
        return Refusals(self.able | {rank}, self.reasons.without(rank))
