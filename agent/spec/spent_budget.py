"""What a job has used up of its budgets: it outlives the node that decides. Pure.

Nodes tell each other how long ago something was, as the clocks of two machines have nothing in
common.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import NamedTuple

MOST_MOMENTS = 32  # that are told; of more the oldest count as one, and no longer than is known
_MOST = 1 << 20  # replacements that a job can have had: more is nonsense


class SpentMoment(NamedTuple):
    """So many replacements were counted so long ago."""

    age_s: float
    times: int


class ToldBudget(NamedTuple):
    """The same as :class:`SpentBudget`, as it travels."""

    restarts: int = 0
    replaced: int = 0
    moments: tuple[SpentMoment, ...] = ()  # the oldest first

    @property
    def is_plausible(self) -> bool:
        """Whether it can be what a job has used up."""
        return (
            0 <= self.restarts <= _MOST
            and self.replaced >= 0
            and len(self.moments) <= MOST_MOMENTS
            and all(0 <= each.age_s < math.inf for each in self.moments)
            and all(0 < each.times <= _MOST for each in self.moments)
        )

    def heard(self, now_s: float) -> SpentBudget:
        """By the clock of this process, which shows ``now_s``."""
        at_s = (now_s - each.age_s for each in self.moments for _ in range(each.times))
        return SpentBudget(self.restarts, self.replaced, tuple(at_s))


class SpentBudget(NamedTuple):
    """What a job has used up since it began."""

    restarts: int = 0  # of all ranks
    replaced: int = 0  # ranks
    replaced_at_s: tuple[float, ...] = ()
    """When each replacement was that may still count, a lost node as one: the oldest first, by the
    monotonic clock of this process."""

    def told(self, now_s: float) -> ToldBudget:
        """For another node; ``now_s``: monotonic."""
        groups = [
            SpentMoment(now_s - at, len(list(row))) for at, row in groupby(self.replaced_at_s)
        ]
        if (more := len(groups) - MOST_MOMENTS) > 0:  # they count longer than they have to
            oldest = groups[: more + 1]
            times = sum(each.times for each in oldest)
            groups[: more + 1] = [oldest[-1]._replace(times=times)]
        return ToldBudget(self.restarts, self.replaced, tuple(map(_rounded, groups)))

    def is_newer_than(self, other: SpentBudget) -> bool:
        """Whether more is known here: neither number ever falls."""
        return self.restarts > other.restarts or self.replaced > other.replaced


def newer_of(known: SpentBudget, heard: SpentBudget) -> SpentBudget:
    """Of what two nodes know, the most; of what they know alike, as ``known`` has it."""
    later = heard if heard.replaced > known.replaced else known
    return later._replace(restarts=max(known.restarts, heard.restarts))


def _rounded(moment: SpentMoment) -> SpentMoment:
    return moment._replace(age_s=max(0.0, round(moment.age_s, 1)))
