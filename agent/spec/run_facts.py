"""The facts of a run that do not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent.spec.job_spec import JobSpec
from worker_hooks.contract.layout import RunLayout
from worker_hooks.contract.protocol import WorkerOrder


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the status page, the failure report and the journal say about the run."""

    spec: JobSpec
    layout: RunLayout
    host: str
    started: float  # seconds since the epoch
    unprotected: str  # why a rank's death costs its steps, as the sources show; empty: not known
    plan: Callable[[int], tuple[WorkerOrder, ...]]  # the orders of an attempt, by local rank

    @property
    def ids(self) -> dict[str, str]:
        """The run's ids."""
        return {"run_id": self.spec.run_id, "record_id": self.spec.record_id}
