"""After how many optimizer steps the next copy is due, so that copies take little of the time.

A copy costs twice: the fork itself, and then the first steps, in which the kernel copies each page
that the process changes. So the first steps behind a copy are compared with those that follow: what
they take longer was the copy's. Pure: times are given to it.
"""

from __future__ import annotations

import math
from collections import deque

SHARE = 0.02  # of the time, for copies
MOST_S = 60.0  # repeated at most after a death, whatever a copy costs
MOST_STEPS = 10_000
FIRST_S = 1.0  # the first intervals double from here: what was measured in the first is a guess;
# likewise after a death
MEASURED = 16  # steps behind a copy that are looked at
_ENOUGH_S = 0.25  # of them, before the first decision
_REMEMBERED = 5  # copies


class Interval:
    """What one rank has measured; it decides for all."""

    def __init__(self) -> None:
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)  # of whole copies, in seconds
        self._step_s = 0.0
        self._longest_s = FIRST_S
        self._cut_step = 0
        self._cut_s = 0.0
        self._fork_s: float | None = None
        self._steps: list[float] = []  # what the first ones behind the copy took
        self._due = 0  # the step of the next copy, if it is known already

    def cut(self, step: int, now_s: float, fork_s: float | None) -> int:
        """A copy was made; returns the optimizer step of the next one, 0 if that is not known yet.

        Args:
            step: the one behind which it was made.
            fork_s: what it took until then; ``None``: unknown, as this is the copy.
        """
        if self._cut_step:
            self._learn()
            self._longest_s = max(self._longest_s, 2 * min(now_s - self._cut_s, MOST_S))
        if fork_s is None:  # deaths come together, and several from one step end the job
            self._longest_s = FIRST_S
        self._cut_step, self._cut_s, self._fork_s = step, now_s, fork_s
        self._steps, self._due = [], 0
        return self._decide() if self._costs else 0

    def stepped(self, step: int, now_s: float, seconds: float) -> int:
        """Another step has ended and took ``seconds``; a number: the next copy is at this one now.

        It is never one that a peer may be past: all take part in each step's collectives.
        """
        if len(self._steps) < MEASURED:
            self._steps.append(seconds)
        passed_s = now_s - self._cut_s
        if passed_s >= MOST_S and self._due != step + 1:
            self._due = step + 1
            return self._due
        is_enough = len(self._steps) >= MEASURED or passed_s >= _ENOUGH_S
        if self._due or len(self._steps) < 2 or not is_enough:  # noqa: PLR2004  one of each kind
            return 0
        self._learn()
        return max(self._decide(), step + 1)

    def _learn(self) -> None:
        """Take what the present interval has shown."""
        steps = self._steps
        if len(steps) < 2:  # noqa: PLR2004  as above
            self._step_s = steps[0] if steps else self._step_s
            return
        after = len(steps) // 2
        self._step_s = _median(steps[after:])
        if self._fork_s is not None:
            longer_s = sum(steps[:after]) - after * self._step_s
            self._costs.append(self._fork_s + max(longer_s, 0.0))
            self._fork_s = None  # counted

    def _decide(self) -> int:
        step_s = max(self._step_s, 1e-6)
        wanted_s = _median(self._costs) / SHARE if self._costs else FIRST_S
        steps = math.ceil(min(wanted_s, self._longest_s, MOST_S) / step_s)
        self._due = self._cut_step + max(1, min(steps, MOST_STEPS))
        return self._due


def _median(values: deque[float] | list[float]) -> float:
    return sorted(values)[len(values) // 2]
