"""What it costs the ranks to note where their state lies, beside what their steps take. Pure."""

from __future__ import annotations

from typing import NamedTuple

from agent.ranks.rank_map import RankMap
from agent.ranks.rank_set import RankSet

BUDGET = 0.005
"""Of a step. Copies that cover updates may take as much again: together 1 %."""

TOO_DEAR = "to note where the state lies takes {:.2%} of a step, more than {:.1%}"


class NoteCosts(NamedTuple):
    """What each rank measured last, in seconds."""

    costs: RankMap[float] = RankMap()
    steps: RankMap[float] = RankMap()

    def told(self, rank: int, cost_s: float, step_s: float) -> NoteCosts:
        """With what a rank has measured."""
        return NoteCosts(self.costs.set(rank, cost_s), self.steps.set(rank, step_s))

    def are_known(self, ranks: RankSet) -> bool:
        """Whether all of these have measured."""
        return not ranks - self.costs.ranks

    def why_too_dear(self, ranks: RankSet) -> str:
        """Why the notes of these ranks are not worth their time; empty: they are, or who knows.

        All ranks note at the end of a step, at the same time, and wait for each other in the next
        one. So the dearest note holds all of them up, and the shortest step counts: what a rank
        measures that waits for others is theirs, too.
        """
        if not self.are_known(ranks):
            return ""
        cost_s = max(self.costs[rank] for rank in ranks)
        step_s = min(self.steps[rank] for rank in ranks)
        share = cost_s / step_s if step_s > 0 else float("inf")
        return TOO_DEAR.format(share, BUDGET) if share > BUDGET else ""
