"""Keeps the account of a job: a fold over the controller's decisions. Pure."""

from __future__ import annotations

from typing import TypeVar

from agent.accounting.account import RECENT, Account
from agent.accounting.incident import Answer, Incident, blamed
from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.attempts import Decision
from agent.controller.job import NEVER, Job
from agent.controller.states import JobState, RankState

Number = TypeVar("Number", int, float)


def after(
    account: Account, before: Job, event: ev.Event, decision: Decision, now_s: float, at: float
) -> Account:
    """The account after a decision.

    Args:
        account: the one before it.
        before: the job before it.
        decision: the job after it, and what is done.
        now_s: monotonic.
        at: the same moment in seconds since the epoch.
    """
    job, silent_s = decision.job, event.silent_s if isinstance(event, ev.RankHung) else 0.0
    account = account._replace(now_s=now_s)
    if account.started_s is None and isinstance(event, ev.WorkerStarted):
        account = account._replace(started_s=now_s)
    account = _with_training(account, job, now_s - silent_s)
    if _breaks(account, before, decision):
        account = _without_present(account, job)
        kind, ranks = blamed(before, event, job)
        present = Incident(at - silent_s, now_s - silent_s, before.attempt, kind, ranks)
        reached = max(account.unresumed, before.newest_step())
        account = account._replace(present=present._replace(reached=reached))
    account = _with_answer(account, before, event, decision)
    is_over = job.state.is_end or is_joined(job)
    return _without_present(account, job) if is_over else account


def is_joined(job: Job) -> bool:
    """Whether the job runs, and all ranks have registered their state."""
    return job.state is JobState.RUNNING and len(job.now.registered) == len(job.ranks)


def trains(job: Job) -> bool:
    """Whether one of them at least has not come to the end of its script."""
    return is_joined(job) and bool(job.having(RankState.RUNNING) - job.now.exiting)


def _with_training(account: Account, job: Job, until_s: float) -> Account:
    """``until_s``: when training ended, if it does: a hang is noticed later."""
    if trains(job):
        since_s = account.now_s if account.since_s is None else account.since_s
        return account._replace(since_s=since_s, is_known=True)
    if account.since_s is None:
        return account
    trained_s = account.trained_s + max(0.0, until_s - account.since_s)
    return account._replace(since_s=None, trained_s=trained_s)


def _breaks(account: Account, before: Job, decision: Decision) -> bool:
    """Whether this is another failure than the one that is being answered."""
    present, job = account.present, decision.job
    if present is not None and present.answer is not Answer.RESTARTED:
        return False
    is_again = job.restarts > before.restarts  # a lone rank failed: the failure is past already
    return is_again or (job.now.failure is not None and before.now.failure is None)


def _with_answer(account: Account, before: Job, event: ev.Event, decision: Decision) -> Account:
    present = account.present
    if present is None or present.answer is Answer.RESTARTED:
        return account
    present = present.after(before, event, decision.job)
    for action in decision.actions:
        match action:
            case do.ReplaceRanks(newcomers=newcomers):
                ranks = present.ranks | {*newcomers}
                present = present._replace(answer=Answer.REPLACED, ranks=ranks)
            case do.StartAttempt():
                present = present._replace(answer=Answer.RESTARTED)
            case do.Finish():
                is_saved = present.reached > 0 and decision.job.is_saved(present.reached)
                present = present._replace(answer=Answer.SAVED if is_saved else Answer.ENDED)
            case _:
                pass
    return account._replace(present=present)


def _without_present(account: Account, job: Job) -> Account:
    """It is over: training resumes, the job has ended, or the next failure came first."""
    present = account.present
    if present is None:
        return account
    over = present._replace(
        lost_s=account.now_s - present.began_s if account.is_known else None,
        lost_steps=_lost_steps(present, job) if account.is_known else None,
    )
    return account._replace(
        present=None,
        recent=(*account.recent, over)[-RECENT:],
        over=account.over + 1,
        lost_s=_sum(account.lost_s, over.lost_s),
        lost_steps=_sum(account.lost_steps, over.lost_steps),
        unresumed=NEVER if is_joined(job) else present.reached,
    )


def _lost_steps(incident: Incident, job: Job) -> int | None:
    if is_joined(job):
        return max(0, incident.reached - min(job.now.registered.values()))
    if not job.state.is_end:  # the next failure counts them
        return 0
    # else a resume may find more than the controller knows of
    return 0 if job.is_saved(incident.reached) else None


def _sum(one: Number | None, other: Number | None) -> Number | None:
    return None if one is None or other is None else one + other
