"""Decides for the job: events in, actions with a reason out.

Pure: no I/O, no clock, no randomness; the job is a value and every decision returns a new one. That
is why a recorded history can be replayed and random schedules simulated. Theory in five lines:

* the first failure is the reason for everything after it; the others are consequences. Only an
  exception yields to a death that is heard of a little later: it may be its consequence;
* after a failure the ranks that hold the state save it, then: stop (signal, grace) -> kill
  (SIGKILL) -> gone; then restart if the budget allows, else fail;
* the first request to stop is polite: where all ranks can stay at one step, it is saved and they
  leave with 0, which the second signal cuts short; the last one means now;
* nothing is ever ordered for a rank that is not alive, and no attempt starts before the last one
  has no rank alive.
"""

from __future__ import annotations

import signal as signals

from agent import actions as do
from agent import dumping, holding
from agent import events as ev
from agent.draining import DRAINING, disturbed, dump_went_on, rank_lost, take
from agent.job import Job
from agent.restarts import fate
from agent.state import Condition, JobState, RankState
from agent.stopping import (
    FAILED_EXIT,
    Decision,
    all_gone,
    begin,
    kill,
    leave_s,
    move,
    signal_ranks,
    stop,
    succeed,
)
from agent.words import describe_exit, listed, signal_name

HURRIED = 2  # the signal that cuts a graceful exit short; without one it means now


def decide(job: Job, event: ev.Event) -> Decision:
    """Answer one event.

    Events of a past attempt, about a rank that already ended, or after the end, change nothing.

    Raises:
        KeyError: the event cannot happen in this state; a bug in the caller or in the table.
    """
    if job.state.is_end or _is_stale(job, event):
        return Decision(job)
    match event:
        case ev.LaunchRequested():
            job = job._replace(best_step=max(job.best_step, job.saved_step))
            return begin(move(job, event, Condition.ALWAYS), "the job begins")
        case ev.WorkerStarted():
            return _worker_started(job, event)
        case ev.StartFailed():
            return _start_failed(job, event)
        case ev.WorkerExited():
            return _worker_exited(job, event)
        case ev.StopRequested() | ev.ExitRequested():
            return _asked(job, event)
        case ev.SignalReceived():
            moved = move(job, event, Condition.ALWAYS)
            why = f"msrun received {signal_name(event.signum)}, which is for the workers"
            return Decision(moved, signal_ranks(moved.having(RankState.RUNNING), event.signum, why))
        case ev.DeadlinePassed():
            return _deadline_passed(job, event)
        case (
            ev.RankRegistered()
            | ev.RankRaised()
            | ev.RankUnreachable()
            | ev.CheckpointFound()
            | ev.ResumeRefused()
        ):
            return _hooks_told(job, event)
        case _:
            return dump_went_on(job, event)


def _is_stale(job: Job, event: ev.Event) -> bool:
    match event:
        case ev.DeadlinePassed():
            return event.attempt != job.attempt or event.state is not job.state
        case ev.WorkerStarted() | ev.StartFailed():
            return event.attempt != job.attempt or job.ranks[event.rank] is not RankState.PENDING
        case ev.RankRaised(rank=rank) if rank in job.raised:
            return True
        case ev.ExitRequested(rank=rank):
            is_gone = rank is not None and not job.ranks[rank].is_alive
            return event.attempt != job.attempt or is_gone
        case ev.WorkerExited() | ev.RankRegistered() | ev.RankRaised() | ev.RankUnreachable():
            return event.attempt != job.attempt or not job.ranks[event.rank].is_alive
        case ev.LaunchRequested() | ev.StopRequested() | ev.SignalReceived():
            return False
        case ev.CheckpointFound():  # what was saved meanwhile, or is about to be, is newer
            is_older = job.resume is not None and event.step <= job.saved_step
            is_known = is_older or job.state in DRAINING
            return event.attempt != job.attempt or is_known
        case ev.ResumeRefused():
            is_begun = job.state in {JobState.STARTING, JobState.RUNNING}
            return event.attempt != job.attempt or not is_begun
        case _:
            return not dumping.is_news(job, event)


def _worker_started(job: Job, event: ev.WorkerStarted) -> Decision:
    job = job.with_rank(event.rank, RankState.RUNNING)
    if job.state is JobState.STARTING:
        awaited = bool(job.having(RankState.PENDING))
        return Decision(
            move(job, event, Condition.RANKS_AWAITED if awaited else Condition.ALL_STARTED)
        )
    # its start was on the way when the stop was decided
    moved = move(job, event, Condition.ALWAYS)
    late = signals.SIGKILL if job.state is JobState.KILLING else job.sent_signal
    why = f"rank {event.rank} came to life while the job is {job.state.value}"
    return Decision(moved, signal_ranks((event.rank,), late, why))


def _start_failed(job: Job, event: ev.StartFailed) -> Decision:
    job = job.with_rank(event.rank, RankState.FAILED)
    reason = f"rank {event.rank} could not be started: {event.why}"
    if job.state is JobState.STARTING:
        job = job._replace(failure=reason)
        if job.alive():
            return stop(move(job, event, Condition.RANK_FAILED), signals.SIGTERM, reason)
        return all_gone(job, event)
    if job.alive():
        return Decision(move(job, event, Condition.RANKS_ALIVE))
    return all_gone(job, event)


def _worker_exited(job: Job, event: ev.WorkerExited) -> Decision:
    job = _known_alive(job, event.rank, event.attempt)
    told = job.state in {JobState.STOPPING, JobState.KILLING} and event.rank not in job.raised
    if told and event.exit_code and job.state is JobState.STOPPING and _is_leaving(job, event.rank):
        told = False
        why = f"rank {event.rank} {describe_exit(event.exit_code)} when it was to leave"
        job = job._replace(failure=job.failure or why)
    ended = RankState.STOPPED if told else RankState.FAILED
    job = job.with_rank(event.rank, ended if event.exit_code else RankState.SUCCEEDED)
    if event.step is not None:
        job = job.with_step(event.rank, event.step)
    match job.state:
        case JobState.STOPPING | JobState.KILLING:
            if job.alive():
                return Decision(move(job, event, Condition.RANKS_ALIVE))
            return all_gone(job, event)
        case JobState.STARTING | JobState.RUNNING if event.exit_code:
            reason = f"rank {event.rank} {describe_exit(event.exit_code)}"
            return _rank_failed(job._replace(failure=reason), event, reason)
        case JobState.STARTING:
            return Decision(move(job, event, Condition.RANKS_AWAITED))
        case JobState.RUNNING:
            return _rank_done(job, event)
        case _:
            return rank_lost(job, event)


def _known_alive(job: Job, rank: int, attempt: int) -> Job:
    """It was heard of before its start was announced."""
    if job.ranks[rank] is RankState.PENDING:
        return _worker_started(job, ev.WorkerStarted(rank, attempt, 0)).job
    return job


def _rank_done(job: Job, event: ev.WorkerExited) -> Decision:
    if job.alive():
        return Decision(move(job, event, Condition.RANKS_ALIVE))
    return succeed(job, event)


def _rank_failed(job: Job, event: ev.WorkerExited | ev.RankRaised, reason: str) -> Decision:
    """The first failure: save what the others hold, or stop them."""
    if job.state is JobState.RUNNING and job.reachable():
        return take(event, dumping.freeze(job, reason))
    if job.state is JobState.RUNNING and job.has_news():
        job = dumping.mourn(job)
    if job.alive():
        return stop(move(job, event, Condition.RANK_FAILED), signals.SIGTERM, reason)
    return all_gone(job, event)


_Told = (
    ev.RankRegistered | ev.RankRaised | ev.RankUnreachable | ev.CheckpointFound | ev.ResumeRefused
)


def _hooks_told(job: Job, event: _Told) -> Decision:
    """What ranks with hooks say without being asked, and what a search for them came to."""
    match event:
        case ev.CheckpointFound():
            return Decision(job.resuming(event.path, event.step))
        case ev.ResumeRefused():
            return _resume_refused(job, event)
        case ev.RankRegistered():  # perhaps once more, after it let go
            job = job._replace(unreachable=job.unreachable - {event.rank})
            return Decision(job.with_step(event.rank, event.step))
        case ev.RankRaised():
            return _rank_raised(job, event)
        case ev.RankUnreachable():
            job = job._replace(unreachable=job.unreachable | {event.rank})
            if job.state is JobState.HOLDING:
                return disturbed(job, event, f"rank {event.rank} let go of its state")
            if job.state is JobState.FREEZING:
                return take(event, dumping.choose(job))
            if job.state is JobState.DUMPING:
                return take(event, dumping.lose(job, event.rank, "let go of its state"))
            return Decision(job)


def _rank_raised(job: Job, event: ev.RankRaised) -> Decision:
    reason = f"rank {event.rank} raised {event.error}"
    if job.state in {JobState.STOPPING, JobState.KILLING}:  # nothing is saved any more
        moved = move(job, event, Condition.ALWAYS)
        return Decision(moved, (do.ReleaseRanks((event.rank,), reason),))
    job = _known_alive(job, event.rank, event.attempt)
    job = job._replace(raised=job.raised | {event.rank})
    if job.failure is None:
        job = job._replace(failure=reason, is_failure_raised=True)
    if job.state in DRAINING:
        return Decision(move(job, event, Condition.ALWAYS))
    if job.state is JobState.HOLDING:
        return disturbed(job, event, reason)
    return _rank_failed(job, event, reason)


def _resume_refused(job: Job, event: ev.ResumeRefused) -> Decision:
    """Who asked is told why, the others are stopped; another attempt would meet the same."""
    for rank in event.ranks:
        if job.ranks[rank].is_alive:
            job = _known_alive(job, rank, event.attempt)
    told = tuple(rank for rank in event.ranks if job.ranks[rank] is RankState.RUNNING)
    job = job._replace(failure=event.why, refusal=event.why, refused=frozenset(told))
    after = stop(move(job, event, Condition.ALWAYS), signals.SIGTERM, event.why)
    actions = (do.RefuseRanks(told, event.why),) if told else ()
    return Decision(after.job, (*actions, *after.actions))


def _asked(job: Job, event: ev.StopRequested | ev.ExitRequested) -> Decision:
    if isinstance(event, ev.ExitRequested):
        return _exit_requested(job, event)
    return _stop_requested(job, event)


def _stop_requested(job: Job, event: ev.StopRequested) -> Decision:
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
            return disturbed(job, event, f"{why}, too")
        case JobState.HOLDING:  # the first signal: a file or a rank asked before, less urgently
            return take(event, holding.hasten(job, _grace_s(job, event)))
        case _ if job.requests >= (HURRIED if job.exit is None else HURRIED + 1):
            return _stop_now(job, event, f"{why} again")
        case _:
            # a failure is being cleared away, or the state of a stop is saved: that goes on, but
            # no restart follows
            return Decision(move(job, event, Condition.NOTED))


def _grace_s(job: Job, event: ev.StopRequested) -> float:
    return job.rules.exit_s if event.grace_s is None else event.grace_s


def _exit_requested(job: Job, event: ev.ExitRequested) -> Decision:
    rank, is_told = event.rank, job.state in {JobState.STOPPING, JobState.KILLING}
    if is_told and rank is not None and not (rank in job.raised or _is_leaving(job, rank)):
        # the signal it caught is msrun's own, which stops it, perhaps for a restart
        moved = move(job, event, Condition.ALWAYS)
        why = f"rank {rank} caught the signal, but the job is {job.state.value}"
        return Decision(moved, (do.DismissRanks((rank,), why),))
    began = job.state in {JobState.STARTING, JobState.RUNNING}
    job = job.requested(event.why)
    if began:
        return _stop_begun(job, event, signals.SIGTERM, job.rules.asked_exit_s)
    return Decision(move(job, event, Condition.ALWAYS))


def _is_leaving(job: Job, rank: int) -> bool:
    return job.exit is not None and rank in job.exit.leaving


def _stop_begun(
    job: Job, event: ev.StopRequested | ev.ExitRequested, signum: int, grace_s: float
) -> Decision:
    """The first request: all to one step; else save what some hold; else the scripts are asked."""
    if job.state is JobState.RUNNING and holding.can_hold(job):
        return take(event, holding.hold(job, job.asked, grace_s))
    if job.state is JobState.RUNNING and job.reachable():
        turn = dumping.freeze(job, job.asked)
        return take(event, turn._replace(condition=Condition.SOME_HOLD))
    return stop(move(job, event, Condition.RANKS_ALIVE), signum, job.asked)


def _stop_now(job: Job, event: ev.StopRequested, reason: str) -> Decision:
    """What was not saved by now is lost."""
    actions: tuple[do.Action, ...] = ()
    if job.state in DRAINING:
        job, _, actions = dumping.abandon(job, reason)
    if job.exit is not None:
        job = holding.spoiled(job, reason)
    # without a rank only the commit was awaited
    is_gone = not job.alive()
    after = all_gone(job, event) if is_gone else kill(move(job, event, Condition.NOW), reason)
    return Decision(after.job, actions + after.actions)


def _deadline_passed(job: Job, event: ev.DeadlinePassed) -> Decision:
    match event.state:
        case JobState.HOLDING:
            return disturbed(job, event, holding.delay(job))
        case JobState.FREEZING:
            return take(event, dumping.choose(job, is_late=True))
        case JobState.DUMPING:
            return take(event, dumping.lose_patience(job))
        case JobState.COMMITTING:
            return take(event, dumping.give_up_commit(job))
        case _:
            return _wait_ended(job, event)


def _wait_ended(job: Job, event: ev.DeadlinePassed) -> Decision:
    moved = move(job, event, Condition.ALWAYS)
    match event.state:
        case JobState.STARTING:
            late = listed(job.having(RankState.PENDING))
            reason = f"{late} did not start within {job.rules.start_s:g} s (--cluster_time_out)"
            return stop(moved._replace(failure=reason), signals.SIGTERM, reason)
        case JobState.STOPPING:
            return kill(*_left(moved))
        case _:
            stuck = f"{listed(job.alive())} cannot be killed (waited {job.rules.kill_s:g} s)"
            reason = stuck if job.failure is None else f"{job.failure}; {stuck}"
            told = f"{reason}{fate(job)}"
            actions = (do.Sweep(told), do.Finish(moved.state, FAILED_EXIT, told))
            return Decision(moved._replace(failure=reason), actions)


def _left(job: Job) -> tuple[Job, str]:
    """Who did not leave in time; an exit is not graceful then."""
    who, exit_ = listed(job.alive()), job.exit
    if exit_ is None or not exit_.leaving:
        return job, f"{who} still alive {job.rules.grace_s:g} s after the signal"
    left = f"{who} still alive {leave_s(job):g} s after the order to leave"
    return holding.spoiled(job, left), left
