"""Whether a failed attempt is followed by another one: the budget, and no crash loops. Pure."""

from __future__ import annotations

from typing import NamedTuple

from agent.controller.job import NEVER, Job, Shadowed
from agent.controller.states import Condition
from agent.text.wording import signal_name, times


class RestartVerdict(NamedTuple):
    """The job with its attempt counted, the answer for the table, and why."""

    job: Job
    condition: Condition
    reason: str


def decide_restart(job: Job) -> RestartVerdict:
    """After an attempt's last rank is gone: stay stopped, try again, or fail."""
    if job.stop.why:
        reason = f"{_describe_stop(job)}{describe_outcome(job)}"
        return RestartVerdict(job, Condition.STOP_WANTED, reason)
    if job.shadows.step != NEVER:
        if not (why_not := _why_not_woken(job)):
            return _woken(job)
        job = job._replace(shadows=Shadowed(why_not=why_not))
        job = job._replace(now=job.now._replace(not_replaced=why_not))
    job = _counted(job)
    policy, failure, outcome = job.policy, job.now.failure or "unknown", describe_outcome(job)
    if job.now.refusal:
        return RestartVerdict(job, Condition.HOPELESS, f"{job.now.refusal}{outcome}")
    if job.lost_node:
        why = "the job needs all its nodes, and none has taken the place of the lost one"
        return _give_up(job, why, f"{failure}: {why}{outcome}")
    if job.is_disputed:
        why = "the replicas disagree without a majority, so nothing is resumed from"
        return _give_up(job, why, f"{failure}: {why}{outcome}")
    if job.stalled >= policy.stalls:
        after = f" after step {job.best_step}" if job.best_step > 0 else ""
        why = f"{job.stalled} attempts in a row reached no commit{after}"
        return _give_up(job, why, f"{failure}: {why}{outcome}")
    if job.restarts >= policy.max_restarts:
        spent = f" (all {policy.max_restarts} restarts are spent)" if policy.max_restarts else ""
        return RestartVerdict(job, Condition.BUDGET_SPENT, f"{failure}{spent}{outcome}")
    is_first = job.restarts == 0 and job.best_step == 0
    if job.has_hooks and is_first and not policy.dump.restarts_explicit:
        same, hint = "so a restart would meet the same", "give --max-restarts to try nevertheless"
        reason = f"{failure}, before the first commit, {same}: {hint}"
        return _give_up(job, f"nothing was committed yet, {same}: {hint}", reason)
    reason = f"restart {job.restarts + 1} of {policy.max_restarts}: {failure}{outcome}"
    return RestartVerdict(job, Condition.BUDGET_LEFT, reason)


def _why_not_woken(job: Job) -> str:
    """Why the ranks do not go on from their shadows; empty: they do."""
    shadows, replace = job.shadows, job.policy.replace
    if shadows.step == shadows.woken and shadows.times >= replace.deaths:
        return f"the ranks went on {times(shadows.times)} from their shadows of one step, in vain"
    if job.replaced >= replace.max_replacements:
        within = f"within {replace.period_s:g} s"
        return f"all {replace.max_replacements} replacements {within} are spent"
    return ""


def _woken(job: Job) -> RestartVerdict:
    """All ranks go on from their shadows."""
    shadows = job.shadows
    again = shadows.times + 1 if shadows.step == shadows.woken else 1
    job = job._replace(shadows=shadows._replace(woken=shadows.step, times=again))
    reason = (
        f"{job.now.failure or 'unknown'}: all ranks go on from their shadows of optimizer step "
        f"{shadows.step}, no step is lost"
    )
    return RestartVerdict(job, Condition.BUDGET_LEFT, reason)


def _describe_stop(job: Job) -> str:
    """How a requested stop went, without what became of the state."""
    stop, exit_ = job.stop, job.now.exit
    if job.left_well():
        return f"graceful exit: {stop.why}, every rank exited with 0"
    if stop.is_resize:
        return f"{stop.why} ({job.now.failure})" if job.now.failure else stop.why
    by = stop.why if stop.signum is None else f"stopped by {signal_name(stop.signum)}"
    if exit_ is None:
        return by
    why = job.now.failure or exit_.interrupted
    return f"{by}, not gracefully: {why}" if why else by


def _give_up(job: Job, why: str, reason: str) -> RestartVerdict:
    """No other attempt, although the budget may allow one: then the report says ``why``."""
    budget = job.policy.max_restarts
    left = budget - job.restarts
    if left > 0:
        job = job._replace(gave_up=f"{why} ({left} of {budget} restarts left unused)")
    return RestartVerdict(job, Condition.HOPELESS, reason)


def _counted(job: Job) -> Job:
    """The job after an attempt reached a newer commit, or one more in a row did not."""
    newest = job.newest_step()
    if not job.has_hooks:
        return job
    if newest > job.best_step:
        return job._replace(best_step=newest, stalled=0)
    return job._replace(stalled=job.stalled + 1)


def describe_outcome(job: Job) -> str:
    """What became of the state, as the end of a reason, and why no rank was replaced.

    Empty if there never was anything to save.
    """
    why = job.now.not_replaced
    not_replaced = f"not replaced: {why}" if why else ""
    return "".join(f"; {part}" for part in (_describe_state(job), not_replaced) if part)


def _describe_state(job: Job) -> str:
    if job.now.outcome:
        return job.now.outcome
    kept = job.kept()
    lost = f"step {job.newest_step()} is not saved" if job.has_news() else ""
    if not lost and not kept and job.has_hooks:
        lost = "no step was committed"
    return "; ".join(part for part in (lost, kept) if part)


def why_not_saved(job: Job) -> str:
    """Why the newest step that the last attempt reached is not saved; empty if it is."""
    state, kept = _describe_state(job), job.kept()
    return "" if kept and state.startswith(kept) else state.removesuffix(f"; {kept}")
