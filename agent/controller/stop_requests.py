"""Requests to stop, by people and batch systems, by a file, or by a rank.

Pure, like the controller. The first is polite: where all ranks can stay at one step, it is saved
and they leave with 0; else what some hold is saved. The last one means now.
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

STOPPED = "a stop was asked for"
Request = ev.StopRequested | ev.ExitRequestedByFile | protocol.ExitRequested

HURRIED = 2  # the signal that cuts a graceful exit short; without one it means now


def stop_requested(job: Job, event: ev.StopRequested) -> Decision:
    """Somebody asks by a signal; each signal is less patient than the one before."""
    why = event.why or f"msrun received {signal_name(event.signum)}"
    job = job.requested(why, event.signum)
    match job.state:
        case JobState.KILLING:
            return Decision(move(job, event, Condition.ALWAYS))
        case _ if event.is_now:
            return _stop_now(job, event, why)
        case JobState.STARTING | JobState.RUNNING:
            signum = event.signum if event.passes else signals.SIGTERM
            return _stop_begun(job, event, signum, _grace_s(job, event))
        case JobState.HOLDING if job.requests == HURRIED:
            return interrupt_hold(job, event, f"{why}, too")
        case JobState.HOLDING:  # the first signal: a file or a rank asked before, less urgently
            return apply(event, graceful_exit.shorten(job, _grace_s(job, event)))
        case JobState.REPLACING:  # all that was lost of it is time
            return apply(event, fall_back_to_disk(job, STOPPED))
        case _ if job.requests >= (HURRIED if job.exit is None else HURRIED + 1):
            return _stop_now(job, event, f"{why} again")
        case _:
            # a failure is being cleared away, or the state of a stop is saved: that goes on, but
            # no restart follows
            return Decision(move(job, event, Condition.NOTED))


def _grace_s(job: Job, event: ev.StopRequested) -> float:
    return job.rules.exit_s if event.grace_s is None else event.grace_s


def exit_requested(job: Job, event: ev.ExitRequestedByFile | protocol.ExitRequested) -> Decision:
    """A file or a rank asks; repeated requests change nothing: all ranks may ask at once."""
    if isinstance(event, protocol.ExitRequested) and _is_own_signal(job, event.rank):
        moved = move(job, event, Condition.ALWAYS)
        why = f"rank {event.rank} caught the signal, but the job is {job.state.value}"
        return Decision(moved, (do.Tell((event.rank,), protocol.Dismiss(why), why),))
    began = job.state in {JobState.STARTING, JobState.RUNNING}
    job = job.requested(event.why)
    if began:
        return _stop_begun(job, event, signals.SIGTERM, job.rules.asked_exit_s)
    if job.state is JobState.REPLACING:
        return apply(event, fall_back_to_disk(job, STOPPED))
    return Decision(move(job, event, Condition.ALWAYS))


def _is_own_signal(job: Job, rank: int) -> bool:
    """Whether the signal that a rank caught is msrun's own, which stops the rank."""
    is_stopped = job.state in {JobState.STOPPING, JobState.KILLING}
    return is_stopped and not (rank in job.raised or is_leaving(job, rank))


def is_leaving(job: Job, rank: int) -> bool:
    """Whether a rank was told to end with 0."""
    return job.exit is not None and rank in job.exit.leaving


def _stop_begun(job: Job, event: Request, signum: int, grace_s: float) -> Decision:
    """The first request: all to one step; else save what some hold; else the scripts are asked."""
    if job.state is JobState.RUNNING and graceful_exit.can_hold(job):
        return apply(event, graceful_exit.hold(job, job.asked, grace_s))
    if job.state is JobState.RUNNING and job.reachable():
        turn = dump.freeze(job, job.asked)
        return apply(event, turn._replace(condition=Condition.SOME_HOLD))
    return stop(move(job, event, Condition.RANKS_ALIVE), signum, job.asked)


def _stop_now(job: Job, event: ev.StopRequested, reason: str) -> Decision:
    """What was not saved by now is lost."""
    actions: tuple[do.Action, ...] = ()
    if job.state in DRAINING:
        job, _, actions = dump.abandon(job, reason)
    elif job.replacement is not None:
        lost = describe_loss(job, job.newest_step(), reason) if job.has_news() else ""
        job = job._replace(outcome=lost, failure=job.replacement.why, replacement=None)
    if job.exit is not None:
        job = graceful_exit.mark_interrupted(job, reason)
    # without a rank only the commit was awaited
    is_gone = not job.alive()
    after = all_gone(job, event) if is_gone else kill(move(job, event, Condition.NOW), reason)
    return Decision(after.job, actions + after.actions)
