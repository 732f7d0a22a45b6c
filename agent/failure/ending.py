"""How a job ended."""

from __future__ import annotations

from dataclasses import dataclass

from agent.accounting.account import Account
from agent.accounting.summary import summary
from agent.controller import actions as do
from agent.controller.job import Job
from agent.controller.restart_policy import why_not_saved
from agent.controller.states import JobState


@dataclass(frozen=True, slots=True)
class RunEnding:
    """How a job ended."""

    state: JobState
    exit_code: int
    reason: str
    saved: str | None = None  # the newest checkpoint folder, if any is known
    lost: str = ""  # why the newest step is not in it
    has_hooks: bool = False  # some rank's state could be saved
    gave_up: str = ""  # why restarts were left unused
    not_replaced: str = ""  # why no rank was replaced although replacing is on
    cost: str = ""  # what its failures cost, in one sentence
    lost_node: str = ""  # why a node is lost
    is_to_end: bool = False  # somebody has asked for that, not only for another size of the job
    asking: frozenset[int] = frozenset()  # ranks that have asked to exit

    @staticmethod
    def of(action: do.Finish, job: Job, account: Account) -> RunEnding:
        """The end of ``job`` that was decided."""
        was_to_replace = job.policy.replace.is_on and job.now.failure
        return RunEnding(
            state=action.state,
            exit_code=action.exit_code,
            reason=action.reason,
            saved=job.on_disk,
            lost=why_not_saved(job),
            has_hooks=job.has_hooks,
            gave_up=job.gave_up,
            not_replaced=job.now.not_replaced if was_to_replace else "",
            cost=summary(account, job),
            lost_node=job.lost_node,
            is_to_end=job.stop.is_to_end,
            asking=frozenset(job.stop.ranks),
        )
