"""How fast a rank trains, from its recent steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worker_hooks.contract.status_page import Pace

NS = 1e-9


class Tempo(NamedTuple):
    """How long a rank's recent steps took, in seconds."""

    steps: int  # how many were measured
    newest: int  # the number of the last one
    median_s: float
    p95_s: float
    own_median_s: float
    own_p95_s: float


def tempo(paces: Sequence[Pace]) -> Tempo | None:
    """The figures of a rank's recent steps; ``None``: there are none."""
    if not paces:
        return None
    steps = sorted(pace.step_ns * NS for pace in paces)
    own = sorted(pace.own_ns * NS for pace in paces)
    at = -(-95 * len(steps) // 100) - 1  # the smallest that at least 95 % do not exceed
    return Tempo(len(paces), paces[-1].step, median(steps), steps[at], median(own), own[at])


def median(ordered: Sequence[float]) -> float:
    """As statistics.median, whose import takes longer than everything else here."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
