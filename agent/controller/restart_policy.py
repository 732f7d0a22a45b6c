"""Whether a failed attempt is followed by another one: the budget, and no crash loops. Pure."""

from __future__ import annotations

from typing import NamedTuple

from agent.controller.job import Job
from agent.controller.states import Condition
from agent.text.wording import signal_name


class RestartVerdict(NamedTuple):
    """The job with its attempt counted, the answer for the table, and why."""

    job: Job
    condition: Condition
    reason: str


def decide_restart(job: Job) -> RestartVerdict:
    """After an attempt's last rank is gone: stay stopped, try again, or fail."""
    if job.asked:
        return RestartVerdict(job, Condition.STOP_WANTED, f"{_stopped(job)}{describe_outcome(job)}")
    job, told = _counted(job), describe_outcome(job)
    failure, rules = job.failure or "unknown", job.rules
    if job.refusal:
        return RestartVerdict(job, Condition.HOPELESS, f"{job.refusal}{told}")
    if job.stalled >= rules.stalls:
        after = f" after step {job.best_step}" if job.best_step > 0 else ""
        why = f"{job.stalled} attempts in a row reached no commit{after}"
        return _given_up(job, why, f"{failure}: {why}{told}")
    if job.restarts >= rules.max_restarts:
        spent = f" (all {rules.max_restarts} restarts are spent)" if rules.max_restarts else ""
        return RestartVerdict(job, Condition.BUDGET_SPENT, f"{failure}{spent}{told}")
    if job.has_hooks and not rules.restarts_explicit and job.restarts == 0 and job.best_step == 0:
        same, hint = "so a restart would meet the same", "give --max-restarts to try nevertheless"
        reason = f"{failure}, before the first commit, {same}: {hint}"
        return _given_up(job, f"nothing was committed yet, {same}: {hint}", reason)
    reason = f"restart {job.restarts + 1} of {rules.max_restarts}: {failure}{told}"
    return RestartVerdict(job, Condition.BUDGET_LEFT, reason)


def _stopped(job: Job) -> str:
    """How a stop that was asked for went, without what became of the state."""
    if job.left_well():
        return f"graceful exit: {job.asked}, every rank left with 0"
    by = job.asked if job.stop_signal is None else f"stopped by {signal_name(job.stop_signal)}"
    if job.exit is None:
        return by
    why = job.failure or job.exit.spoiled
    return f"{by}, not gracefully: {why}" if why else by


def _given_up(job: Job, why: str, reason: str) -> RestartVerdict:
    """No other attempt, although the budget may allow one: ``why`` then belongs in the report."""
    budget = job.rules.max_restarts
    left = budget - job.restarts
    if left > 0:
        job = job._replace(gave_up=f"{why} ({left} of {budget} restarts left unused)")
    return RestartVerdict(job, Condition.HOPELESS, reason)


def _counted(job: Job) -> Job:
    """An attempt reached something new, or one more in a row did not."""
    newest = job.newest_step()
    if not job.has_hooks:
        return job
    if newest > job.best_step:
        return job._replace(best_step=newest, stalled=0)
    return job._replace(stalled=job.stalled + 1)


def describe_outcome(job: Job) -> str:
    """What became of the state, as the end of a reason, and why nobody was replaced.

    Empty if nothing ever was to be saved.
    """
    told = _told(job)
    not_replaced = f"not replaced: {job.not_replaced}" if job.not_replaced else ""
    return "".join(f"; {words}" for words in (told, not_replaced) if words)


def _told(job: Job) -> str:
    """What became of the state."""
    told = job.outcome
    if not told:
        newest, kept = job.newest_step(), job.kept()
        lost = f"step {newest} is not saved" if newest > max(job.saved_step, 0) else ""
        if not lost and not kept and job.has_hooks:
            lost = "no step was committed"
        told = "; ".join(words for words in (lost, kept) if words)
    return told


def why_not_saved(job: Job) -> str:
    """Why the newest step that the last attempt reached is not saved; empty if it is."""
    told, kept = _told(job), job.kept()
    return "" if kept and told.startswith(kept) else told.removesuffix(f"; {kept}")
