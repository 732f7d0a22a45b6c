"""Requests to stop, by people and batch systems, by a file, or by a rank.

Pure, like the controller. The first is polite: where all ranks can stay at one step, it is saved
and they exit with 0; else what some hold is saved. The last one means now.
"""

from __future__ import annotations

import signal as signals

from agent.controller import actions as do
from agent.controller import dump, graceful_exit
from agent.controller import events as ev
from agent.controller.attempts import Decision, all_gone, kill, move, stop
from agent.controller.drain import DRAINING, apply, interrupt_hold
from agent.controller.dump import describe_loss
from agent.controller.job import Job
from agent.controller.replacement import fall_back_to_disk
from agent.controller.states import Condition, JobState
from agent.text.wording import signal_name
from worker_hooks.contract import protocol

Request = ev.StopRequested | ev.ExitRequestedByFile | protocol.ExitRequested

STOPPED = "a stop was asked for"
HURRIED = 2  # the signal that cuts a graceful exit short; without one it means now


def stop_requested(job: Job, event: ev.StopRequested) -> Decision:
    """Somebody asks by a signal; each signal is less patient than the one before."""
    why = event.why or f"msrun received {signal_name(event.signum)}"
    job = job.requested(why, event.signum, event.node, goes_on=event.leaves)
    timeouts, count = job.policy.timeouts, job.stop.signals
    grace_s = timeouts.exit_s if event.grace_s is None else event.grace_s
    match job.state:
        case JobState.KILLING:
            return Decision(move(job, event, Condition.ALWAYS))
        case _ if event.is_now:
            return _stop_now(job, event, why)
        case JobState.STARTING | JobState.RUNNING:
            signum = event.signum if event.passes else signals.SIGTERM
            return _begin_stop(job, event, signum, grace_s)
        case JobState.HOLDING if count == HURRIED:
            return interrupt_hold(job, event, why if event.leaves else f"{why} again")
        case JobState.HOLDING:  # the first signal: a file or a rank asked before, less urgently
            return apply(event, graceful_exit.shorten(job, grace_s))
        case JobState.REPLACING:  # a replacement loses only time
            return apply(event, fall_back_to_disk(job, STOPPED))
        case _ if count >= (HURRIED if job.now.exit is None else HURRIED + 1):
            return _stop_now(job, event, f"{why} again")
        case _:
            # what follows a failure or an earlier request continues, but no restart follows it
            return Decision(move(job, event, Condition.NOTED))


def exit_requested(job: Job, event: ev.ExitRequestedByFile | protocol.ExitRequested) -> Decision:
    """A file or a rank asks; repeated requests change nothing: all ranks may ask at once."""
    if isinstance(event, protocol.ExitRequested) and _is_own_signal(job, event.rank):
        moved = move(job, event, Condition.ALWAYS)
        why = f"rank {event.rank} caught the signal, but the job is {job.state.value}"
        return Decision(moved, (do.Tell((event.rank,), protocol.Dismiss(why), why),))
    if isinstance(event, protocol.ExitRequested):
        job = job.requested_by(event.rank, event.why)
    else:
        job = job.requested(event.why, goes_on=event.goes_on)
    if job.state in {JobState.STARTING, JobState.RUNNING}:
        return _begin_stop(job, event, signals.SIGTERM, job.policy.timeouts.asked_exit_s)
    if job.state is JobState.REPLACING:
        return apply(event, fall_back_to_disk(job, STOPPED))
    return Decision(move(job, event, Condition.ALWAYS))


def _is_own_signal(job: Job, rank: int) -> bool:
    """Whether the signal that a rank caught is msrun's own, which stops the rank."""
    is_stopped = job.state in {JobState.STOPPING, JobState.KILLING}
    return is_stopped and not (rank in job.now.raised or is_leaving(job, rank))


def is_leaving(job: Job, rank: int) -> bool:
    """Whether a rank was ordered to exit with 0."""
    return job.now.exit is not None and rank in job.now.exit.leaving


def _begin_stop(job: Job, event: Request, signum: int, grace_s: float) -> Decision:
    """The first request: all to one step; else save what some hold; else signal the scripts."""
    why = job.stop.why
    if job.state is JobState.RUNNING and graceful_exit.can_hold(job):
        return apply(event, graceful_exit.hold(job, why, grace_s))
    if job.state is JobState.RUNNING and job.reachable():
        return apply(event, dump.freeze(job, why)._replace(condition=Condition.SOME_HOLD))
    return stop(move(job, event, Condition.RANKS_ALIVE), signum, why)


def _stop_now(job: Job, event: ev.StopRequested, reason: str) -> Decision:
    """What was not saved by now is lost."""
    actions: tuple[do.Action, ...] = ()
    replacement = job.since_restart.replacement
    if job.state in DRAINING:
        job, _, actions = dump.give_up(job, job.present_dump(), reason)
    elif replacement is not None:
        lost = describe_loss(job, job.newest_step(), reason) if job.has_news() else ""
        now = job.now._replace(outcome=lost, failure=replacement.why)
        job = job._replace(now=now).with_replacement(None)
    if job.now.exit is not None:
        job = graceful_exit.mark_interrupted(job, reason)
    job = job._replace(now=job.now._replace(is_kept_next=False))  # to read memory takes its time
    # without a rank only the commit was awaited
    is_gone = not job.alive()
    after = all_gone(job, event) if is_gone else kill(move(job, event, Condition.NOW), reason)
    return Decision(after.job, actions + after.actions)
