"""How much of a job's time was training, and what its failures cost, as of one moment. Pure.

Training is the time in which the job runs and every rank has registered its state; it ends when a
rank fails, when a stop is asked for, or when every script has come to its end. Whether ranks
without a ``TrainState`` train is not known, so neither is their share.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from agent.accounting.incident import Incident
from agent.controller.job import NEVER
from agent.spec.spent_budget import SpentBudget

RECENT = 5  # incidents that are shown


class Account(NamedTuple):
    """Times are monotonic seconds."""

    now_s: float = 0.0
    started_s: float | None = None  # the first rank's process exists since then
    since_s: float | None = None  # training since then; None: it stands still
    trained_s: float = 0.0  # before that
    is_known: bool = False  # all ranks registered their state at least once
    present: Incident | None = None  # training has not resumed after it
    recent: tuple[Incident, ...] = ()  # the last that are over, the oldest first
    over: int = 0  # incidents that are over
    lost_s: float | None = 0.0  # by those; None: not known of one of them
    lost_steps: int | None = 0
    unresumed: int = NEVER  # the step that the last incident interrupted, if none followed it yet
    before: SpentBudget = SpentBudget()  # by the same job under another controller

    @property
    def shown(self) -> tuple[Incident, ...]:
        """The last incidents, the oldest first."""
        found = self.recent if self.present is None else (*self.recent, self.present)
        return found[-RECENT:]

    @property
    def incidents(self) -> int:
        """How many there were."""
        return self.over + (self.present is not None)

    @property
    def wall_s(self) -> float:
        """Since the first rank's process exists."""
        return 0.0 if self.started_s is None else self.now_s - self.started_s

    @property
    def training_s(self) -> float | None:
        """How much of that was training; ``None``: not known."""
        if not self.is_known:
            return None
        return self.trained_s + (0.0 if self.since_s is None else self.now_s - self.since_s)

    @property
    def goodput(self) -> float | None:
        """The same as a share."""
        training_s = self.training_s
        return None if training_s is None or self.wall_s <= 0 else training_s / self.wall_s

    def facts(self) -> dict[str, object]:
        """For programs."""
        share, training_s, lost_s = self.goodput, self.training_s, self.lost_s
        return {
            "share": None if share is None else math.floor(1e4 * share) / 1e4,
            "training_s": None if training_s is None else round(training_s, 3),
            "wall_s": round(self.wall_s, 3),
            "lost_s": None if lost_s is None else round(lost_s, 3),
            "lost_steps": self.lost_steps,
            "incidents": self.incidents,
        }
