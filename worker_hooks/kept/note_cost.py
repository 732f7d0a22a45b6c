"""How much of a step it takes to note where the state lies. Pure."""

from __future__ import annotations

from collections import deque

FIRST = 4  # steps that are longer than others: torch makes and compiles there what it keeps
LOOKS = 12  # steps of which the median is told
EVERY = 64  # steps from one report to the next


class NoteCost:
    """What one rank has measured, in seconds."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._costs: deque[float] = deque(maxlen=LOOKS)
        self._steps: deque[float] = deque(maxlen=LOOKS)
        self._commits = 0
        self._told = 0  # the commit of the last report
        self._began = 0.0

    def commit_begins(self, now: float) -> None:
        """A commit; ``now``: of any clock, in seconds."""
        if self._commits:
            self._steps.append(now - self._began)
        self._commits, self._began = self._commits + 1, now

    def noted(self, cost_s: float) -> tuple[float, float] | None:
        """A note took so long; a note's and a step's median, if they are to be told now."""
        self._costs.append(cost_s)
        behind = self._commits - FIRST - LOOKS
        if behind < 0 or behind % EVERY or self._told == self._commits:
            return None
        self._told = self._commits
        return _median(self._costs), _median(self._steps)


def _median(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2]
