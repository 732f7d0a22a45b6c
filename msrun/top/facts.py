"""What ``msrun top`` knows of a job at one moment: plain facts, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agent.workers.tempo import tempo
from msrun.runs.cost import PastIncident
from msrun.runs.run_state import WorkerState
from msrun.top.history import EventHistory
from worker_hooks.contract.status_page import Heartbeat, Pace, Phase

NS = 1e-9
RATE_S = 10.0  # steps a second are counted over about so long
SILENT_S = 1.0  # a younger heartbeat is normal
NEWS_S = 5.0  # the same of what another node tells: that comes every three seconds


class RankFacts(NamedTuple):
    """One rank; ``None`` and empty: not known."""

    rank: int
    pid: int | None = None
    state: str = ""
    phase: str = ""
    epoch: int | None = None
    step: int | None = None
    steps_per_s: float | None = None
    step_s: tuple[float, ...] = ()  # how long the last steps took, oldest first
    own_s: float | None = None  # the median time of a step without waiting for peers
    rss_bytes: int | None = None
    cpu_percent: float | None = None  # of one processor
    gpu_bytes: int | None = None
    gpu_percent: float | None = None  # of its busiest GPU
    silent_s: float = 0.0  # since its last heartbeat

    def with_page(self, beat: Heartbeat, paces: Sequence[Pace], now_ns: int | None) -> RankFacts:
        """The same with the content of its page; ``now_ns``: monotonic, ``None``: it has ended."""
        step_s = tuple(pace.step_ns * NS for pace in paces)
        known = self._replace(epoch=beat.epoch, step=beat.step, step_s=step_s)
        if now_ns is None:
            return known
        silent_s = max(0, now_ns - beat.at_ns) * NS
        measured = tempo(paces)
        return known._replace(
            phase=Phase(beat.phase).name.lower(),
            silent_s=silent_s,
            steps_per_s=rate(step_s, silent_s),
            own_s=None if measured is None else measured.own_median_s,
        )

    def as_told(self, told: WorkerState, standing_s: float | None) -> RankFacts:
        """The same with what its node, another one, has told a moment ago.

        ``standing_s``: for how long no further step was told of; ``None``: the rank has ended.
        """
        known = self._replace(epoch=told.epoch, step=told.step)
        if standing_s is None or told.step is None:
            return known
        silent_s = standing_s if standing_s >= NEWS_S else 0.0
        pace = told.step_median_s and max(told.step_median_s, silent_s)
        return known._replace(
            silent_s=silent_s,
            steps_per_s=1 / pace if pace else None,
            own_s=told.step_own_median_s,
        )


class JobFacts(NamedTuple):
    """The job and its ranks, ordered by rank."""

    run: str  # the record's id
    script: str
    state: str
    uptime: str
    ranks: tuple[RankFacts, ...]
    counts: tuple[str, ...] = ()  # attempt, restarts, replaced ranks, as text; empty: not known
    shadows: str = ""  # how many, and their memory
    incident: PastIncident | None = None  # the last
    history: EventHistory = EventHistory()
    resumed: int | None = None  # the step that it began from
    checkpoint: int | None = None  # the newest saved step
    now: float = 0.0  # seconds since the epoch
    is_over: bool = False

    @property
    def step(self) -> int | None:
        """The newest step of any rank."""
        return max((one.step for one in self.ranks if one.step is not None), default=None)


def rate(step_s: Sequence[float], silent_s: float) -> float | None:
    """Recent steps a second; the rate of a rank without progress falls and falls."""
    total_s = silent_s if silent_s >= SILENT_S else 0.0
    count = 0
    for took_s in reversed(step_s):
        count += 1
        total_s += took_s
        if total_s >= RATE_S:
            break
    return count / total_s if total_s > 0 and count else None
