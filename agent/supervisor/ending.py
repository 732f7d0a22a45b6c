"""How a job ended."""

from __future__ import annotations

from dataclasses import dataclass

from agent.controller import actions as do
from agent.controller.job import Job
from agent.controller.restart_policy import why_not_saved
from agent.controller.states import JobState
from agent.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class RunEnding:
    """How a job ended, and the last attempt's workers."""

    state: JobState
    exit_code: int
    reason: str
    attempt: int
    workers: tuple[Worker, ...]
    saved: str | None = None  # the newest checkpoint folder, if any is known
    lost: str = ""  # why the newest step is not in it, in words
    has_hooks: bool = False  # some rank's state could be saved
    gave_up: str = ""  # why restarts were left unused, in words
    not_replaced: str = ""  # why nobody was replaced who was to be, in words

    @staticmethod
    def of(action: do.Finish, job: Job, workers: tuple[Worker, ...]) -> RunEnding:
        """The end of ``job`` that was decided."""
        return RunEnding(
            action.state,
            action.exit_code,
            action.reason,
            job.attempt,
            workers,
            job.resume,
            why_not_saved(job),
            job.has_hooks,
            job.gave_up,
            job.now.not_replaced if job.policy.replace.is_on and job.now.failure else "",
        )
