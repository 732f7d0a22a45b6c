"""Decides for the job: events in, actions with a reason out.

Pure: no I/O, no clock, no randomness; the job is a value and every decision returns a new one. That
is why a recorded history can be replayed and random schedules simulated. Theory in six lines:

* the first failure is the reason for everything after it; the others are consequences. Only an
  exception yields to a death that is heard of a little later: it may be its consequence;
* after a failure the ranks that hold the state save it, then: stop (signal, grace) -> kill
  (SIGKILL) -> gone; then restart if the budget allows, else fail;
* where it can be, the state is saved in memory, and only what is lost is started again;
* the first request to stop is polite, the last one means now;
* nothing is ever ordered for a rank that is not alive, and no attempt starts before the last one
  has no rank alive.
"""

from __future__ import annotations

import signal as signals

from agent.controller import actions as do
from agent.controller import dump, graceful_exit, replacement
from agent.controller import events as ev
from agent.controller.attempts import (
    FAILED_EXIT,
    Decision,
    all_gone,
    begin,
    kill,
    leave_s,
    move,
    release,
    signal_ranks,
    stop,
    succeed,
)
from agent.controller.drain import DRAINING, apply, dump_went_on, interrupt_hold, rank_lost
from agent.controller.job import Job
from agent.controller.restart_policy import describe_outcome
from agent.controller.states import Condition, JobState, RankState
from agent.controller.stop_requests import exit_requested, is_leaving, stop_requested
from agent.text.wording import describe_exit, listed, signal_name
from worker_hooks.contract import protocol


def decide(job: Job, event: ev.Event) -> Decision:
    """Answer one event.

    Events of a past attempt, about a rank that already ended, or after the end, change nothing.

    Raises:
        KeyError: the event cannot happen in this state; a bug in the caller or in the table.
    """
    if job.state.is_end or _is_stale(job, event):
        return Decision(job)
    if job.state is JobState.REPLACING and isinstance(event, replacement.Event):
        after = apply(event, replacement.hear(job, event))
    else:
        after = _answer(job, event)
    job, freed = replacement.forget(after.job)
    return Decision(job, freed + after.actions)


def _is_stale(job: Job, event: ev.Event) -> bool:  # noqa: C901  a row for each kind of event
    """Whether an event is about what is over: an attempt, a rank that ended, another dump."""
    if isinstance(
        event, dump.DumpEvent
    ):  # no two dumps have the same id: it tells the attempt, too
        return dump.is_stale(job, event)
    match event:
        case ev.LaunchRequested() | ev.StopRequested() | ev.SignalReceived() | ev.ReplacementAged():
            return False
        case _ if event.attempt != job.attempt:
            return True
        case ev.ExitRequestedByFile():
            return False
        case ev.DeadlinePassed():
            return event.state is not job.state
        case ev.WorkerStarted() | ev.StartFailed():
            return job.ranks[event.rank] is not RankState.PENDING
        case protocol.Raised() if event.rank in job.raised:
            return True
        case (
            ev.WorkerExited()
            | ev.RankUnreachable()
            | protocol.Registered()
            | protocol.Raised()
            | protocol.ExitRequested()
        ):
            return not job.ranks[event.rank].is_alive
        case ev.RankHung():
            return not _is_suspect(job, event)
        case protocol.Rejoining():
            return not replacement.is_awaited(job, event)
        case ev.CheckpointFound():  # what was saved meanwhile, or is about to be, is newer
            is_older = job.resume is not None and event.step <= job.saved_step
            return is_older or job.state in {*DRAINING, JobState.REPLACING}
        case ev.ResumeRefused():
            return job.state not in {JobState.STARTING, JobState.RUNNING}


def _answer(job: Job, event: ev.Event) -> Decision:  # noqa: C901, PLR0912  as above
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
        case ev.StopRequested():
            return stop_requested(job, event)
        case ev.ExitRequestedByFile() | protocol.ExitRequested():
            return exit_requested(job, event)
        case ev.SignalReceived():
            moved = move(job, event, Condition.ALWAYS)
            why = f"msrun received {signal_name(event.signum)}, which is for the workers"
            return Decision(moved, signal_ranks(moved.having(RankState.RUNNING), event.signum, why))
        case ev.DeadlinePassed():
            return _deadline_passed(job, event)
        case ev.ReplacementAged():
            return Decision(job._replace(replaced=max(job.replaced - 1, 0)))
        case ev.CheckpointFound():
            return Decision(job.resuming(event.path, event.step))
        case ev.ResumeRefused():
            return _resume_refused(job, event)
        case ev.RankHung():
            return _rank_hung(job, event)
        case ev.RankUnreachable():
            return _rank_unreachable(job, event)
        case protocol.Registered():  # perhaps once more, after its link was closed
            job = job._replace(
                unreachable=job.unreachable - {event.rank},
                why_fixed={**job.why_fixed, event.rank: event.why_fixed},
            )
            return Decision(job.with_step(event.rank, event.step))
        case protocol.Raised():
            return _rank_raised(job, event)
        case protocol.Rejoining():  # for a replacement that is over
            return Decision(job)
        case _:
            return dump_went_on(job, event)


def _worker_started(job: Job, event: ev.WorkerStarted) -> Decision:
    job = job.with_rank(event.rank, RankState.RUNNING)
    if job.state is JobState.STARTING:
        awaited = bool(job.having(RankState.PENDING))
        return Decision(
            move(job, event, Condition.RANKS_AWAITED if awaited else Condition.ALL_STARTED)
        )
    if job.state is JobState.COMMITTING:  # stopped soon, with all others
        return Decision(move(job, event, Condition.ALWAYS))
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
    if job.state is JobState.COMMITTING:
        return Decision(move(job, event, Condition.ALWAYS))
    if job.alive():
        return Decision(move(job, event, Condition.RANKS_ALIVE))
    return all_gone(job, event)


def _worker_exited(job: Job, event: ev.WorkerExited) -> Decision:
    job = _known_alive(job, event.rank, event.attempt)
    told = job.state in {JobState.STOPPING, JobState.KILLING} and event.rank not in job.raised
    if told and event.exit_code and job.state is JobState.STOPPING and is_leaving(job, event.rank):
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


def _rank_failed(
    job: Job, event: ev.WorkerExited | protocol.Raised | ev.RankHung, reason: str
) -> Decision:
    """The first failure: save what the others hold, or stop them."""
    if job.state is JobState.RUNNING and job.reachable():
        return apply(event, dump.freeze(job, reason))
    if job.state is JobState.RUNNING and job.has_news():
        job = dump.record_lost_step(job)
    if job.alive():
        return stop(move(job, event, Condition.RANK_FAILED), signals.SIGTERM, reason)
    return all_gone(job, event)


def _rank_unreachable(job: Job, event: ev.RankUnreachable) -> Decision:
    job = job._replace(unreachable=job.unreachable | {event.rank})
    match job.state:
        case JobState.HOLDING:
            return interrupt_hold(job, event, f"rank {event.rank} let go of its state")
        case JobState.FREEZING:
            return apply(event, dump.choose(job))
        case JobState.DUMPING:
            return apply(event, dump.lose(job, event.rank, "let go of its state"))
        case _:
            return Decision(job)


def _rank_raised(job: Job, event: protocol.Raised) -> Decision:
    reason = f"rank {event.rank} raised {event.error}"
    if job.state in {JobState.STOPPING, JobState.KILLING}:  # nothing is saved any more
        moved = move(job, event, Condition.ALWAYS)
        return Decision(moved, (release((event.rank,), reason),))
    job = _known_alive(job, event.rank, event.attempt)
    job = job._replace(raised=job.raised | {event.rank})
    if job.failure is None:
        job = job._replace(failure=reason, is_failure_raised=True, first_raised=event.rank)
    if job.state in DRAINING:
        return Decision(move(job, event, Condition.ALWAYS))
    if job.state is JobState.HOLDING:
        return interrupt_hold(job, event, reason)
    return _rank_failed(job, event, reason)


def _is_suspect(job: Job, event: ev.RankHung) -> bool:
    """Whether a rank that hangs is in the way: not if it answers, or saves the state."""
    rank = event.rank
    if not job.ranks[rank].is_alive or rank in job.hung:
        return False
    if job.state is JobState.FREEZING:
        answers = {} if job.dump is None else job.dump.answers
        return rank not in answers and _others(job, rank)
    return job.state in {JobState.STARTING, JobState.RUNNING, JobState.HOLDING}


def _others(job: Job, rank: int) -> bool:
    return any(other != rank for other in job.reachable())


def _rank_hung(job: Job, event: ev.RankHung) -> Decision:
    """It is killed, unless nobody else holds the state: then that is saved first."""
    rank, reason = event.rank, f"rank {event.rank} {event.why}"
    job = _known_alive(job, rank, event.attempt)
    killed: tuple[do.Action, ...] = ()
    if _others(job, rank) or rank not in job.reachable():
        job = job._replace(hung=job.hung | {rank})
        killed = signal_ranks((rank,), signals.SIGKILL, reason)
    if job.failure is None or job.is_failure_raised:
        more = "" if job.failure is None else f" ({job.failure})"
        job = job._replace(failure=f"{reason}{more}", is_failure_raised=False)
    match job.state:
        case JobState.HOLDING:
            after = interrupt_hold(job, event, reason)
        case JobState.FREEZING:
            after = apply(event, dump.choose(job))
        case _:
            after = _rank_failed(job, event, reason)
    return Decision(after.job, killed + after.actions)


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


def _deadline_passed(job: Job, event: ev.DeadlinePassed) -> Decision:
    match event.state:
        case JobState.HOLDING:
            return interrupt_hold(job, event, graceful_exit.describe_delay(job))
        case JobState.FREEZING:
            return apply(event, dump.choose(job, is_late=True))
        case JobState.DUMPING:
            return apply(event, dump.lose_patience(job))
        case JobState.COMMITTING:
            return apply(event, dump.give_up_commit(job))
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
            told = f"{reason}{describe_outcome(job)}"
            actions = (do.Sweep(told), do.Finish(moved.state, FAILED_EXIT, told))
            return Decision(moved._replace(failure=reason), actions)


def _left(job: Job) -> tuple[Job, str]:
    """Who did not leave in time; an exit is not graceful then."""
    who, exit_ = listed(job.alive()), job.exit
    if exit_ is None or not exit_.leaving:
        return job, f"{who} still alive {job.rules.grace_s:g} s after the signal"
    left = f"{who} still alive {leave_s(job):g} s after the order to leave"
    return graceful_exit.mark_interrupted(job, left), left
