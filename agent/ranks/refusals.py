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

    def noted(self, ranks: RankSet, why_not: str) -> Refusals:
        """The same once these ranks have said this; empty: they can."""
        if why_not:
            reasons = self.reasons.with_all(dict.fromkeys(ranks, why_not))
            return Refusals(self.able - ranks, reasons)
        reasons = self.reasons
        for rank in ranks & reasons.ranks:
            reasons = reasons.without(rank)
        return Refusals(self.able | ranks, reasons)
