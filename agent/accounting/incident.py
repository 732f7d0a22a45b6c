"""One failure of a job: which ranks, why, what was done about it, and what it cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from agent.controller import events as ev
from agent.controller.job import NEVER, Job
from agent.controller.states import JobState, RankState
from worker_hooks.contract import protocol

TELLS_STEP = ev.WorkerExited | protocol.Registered | protocol.Frozen
"""What says how far a rank has come."""


class FailureKind(Enum):
    """In which way ranks failed first."""

    KILLED = "killed"  # by a signal
    HUNG = "hung"
    RAISED = "exception"
    EXITED = "exit"  # with a code, or with 0 amid training
    NOT_STARTED = "not started"
    OTHER = "other"  # of no rank alone: no checkpoint can be trusted, replicas differ


class Answer(Enum):
    """What was done about it."""

    NONE = ""  # nothing yet
    REPLACED = "replaced"  # the lost ranks alone
    RESTARTED = "restarted"  # all ranks
    SAVED = "saved"  # the newest step, as the job ended
    ENDED = "ended"  # the job, and its newest step is not known to be saved


class Incident(NamedTuple):
    """A failure and what follows it, until training resumes."""

    at: float  # seconds since the epoch, for people
    began_s: float  # monotonic
    attempt: int  # that broke
    kind: FailureKind
    ranks: frozenset[int]  # that were lost
    causes: Mapping[int, str] = {}  # as the controller says it, by attempt
    reached: int = NEVER  # the newest step that was known to be committed
    answer: Answer = Answer.NONE
    lost_s: float | None = None  # how long training stood still; None: not over, or not known
    lost_steps: int | None = None  # committed, and trained again; None: the same

    @property
    def cause(self) -> str:
        """Why, in one line."""
        return "; ".join(dict.fromkeys(self.causes.values())).replace("\n", " ")

    @property
    def step(self) -> int | None:
        """The step that was under way, as people count; ``None``: not known."""
        return self.reached + 1 if self.reached > NEVER else None

    def facts(self) -> dict[str, object]:
        """For programs."""
        return {
            "at": round(self.at, 3),
            "attempt": self.attempt,
            "ranks": sorted(self.ranks),
            "kind": self.kind.value,
            "cause": self.cause,
            "step": self.step,
            "answer": self.answer.value,
            "lost_s": None if self.lost_s is None else round(self.lost_s, 3),
            "lost_steps": self.lost_steps,
        }

    def after(self, before: Job, event: ev.Event, job: Job) -> Incident:
        """The same after one more event: others fail, the cause and the newest step show."""
        step = event.step if isinstance(event, TELLS_STEP) and job is not before else None
        is_again = job.restarts > before.restarts  # then the job knows of the new attempt only
        known = self._replace(reached=max(self.reached, NEVER if step is None else step))
        why = job.failed if is_again else job.now.failure
        if why:
            known = known._replace(causes={**known.causes, before.attempt: why})
        if before.state in {JobState.STOPPING, JobState.KILLING}:  # exits are ordered
            return known
        kind, ranks = blamed(before, event, job)
        is_death = kind in {FailureKind.KILLED, FailureKind.EXITED, FailureKind.HUNG}
        if not (is_death and ranks):
            return known
        if known.kind is FailureKind.RAISED:  # the exception was a consequence
            return known._replace(kind=kind, ranks=ranks)
        return known._replace(ranks=known.ranks | ranks)


def blamed(before: Job, event: ev.Event, job: Job) -> tuple[FailureKind, frozenset[int]]:
    """In which way an event breaks a job, and the ranks that it is about."""
    if left := {rank for rank in job.now.left_amid if job.ranks[rank] is RankState.FAILED}:
        return FailureKind.EXITED, frozenset(left)
    match event:
        case ev.WorkerExited(rank=rank) if rank in before.now.raised:  # it was held, and let go
            return FailureKind.RAISED, frozenset({rank})
        case ev.WorkerExited(rank=rank, exit_code=code) if code:
            return (FailureKind.KILLED if code < 0 else FailureKind.EXITED), frozenset({rank})
        case protocol.Raised(rank=rank):
            return FailureKind.RAISED, frozenset({rank})
        case ev.RankHung(rank=rank):
            return FailureKind.HUNG, frozenset({rank})
        case ev.StartFailed(rank=rank):
            return FailureKind.NOT_STARTED, frozenset({rank})
        case ev.DeadlinePassed(state=JobState.STARTING):
            return FailureKind.NOT_STARTED, frozenset(before.having(RankState.PENDING))
        case _:
            return FailureKind.OTHER, frozenset()
