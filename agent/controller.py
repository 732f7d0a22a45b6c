"""Decides for the job: events in, actions with a reason out.

Pure: no I/O, no clock, no randomness; the job is a value and every decision returns a new one. That
is why a recorded history can be replayed and random schedules simulated. Theory in four lines:

* the first failure is the reason for everything after it; the others are consequences;
* stop (signal, grace) -> kill (SIGKILL) -> gone; then restart if the budget allows, else fail;
* the first request to stop is polite, the second means now;
* nothing is ever ordered for a rank that is not alive, and no attempt starts before the last one
  has no rank alive.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agent import events as ev
from agent.state import Condition, JobState, RankState, next_state

FAILED_EXIT = 1
SIGNAL_EXIT_BASE = 128  # the shell's convention: 128 + signal
LISTED = 8  # ranks named in a sentence


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user asked for, as far as decisions need it. Seconds; ``None``: no bound."""

    ranks: tuple[int, ...]
    max_restarts: int
    start_s: float | None
    grace_s: float
    kill_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """Everything the controller remembers."""

    rules: Rules
    state: JobState = JobState.NEW
    attempt: int = 0
    ranks: dict[int, RankState] = field(default_factory=dict)
    stop_signal: int | None = None  # the first signal that asked for a stop
    sent_signal: int = signals.SIGTERM  # what ranks that start late are stopped with
    failure: str | None = None  # why the present attempt failed, in words

    def alive(self) -> tuple[int, ...]:
        """Ranks that exist or may come to exist."""
        return tuple(rank for rank, state in self.ranks.items() if state.is_alive)

    def having(self, state: RankState) -> tuple[int, ...]:
        """Ranks in ``state``."""
        return tuple(rank for rank, now in self.ranks.items() if now is state)


@dataclass(frozen=True, slots=True)
class Decision:
    """The job after an event, what to do, and whether the event was only noted."""

    job: Job
    actions: tuple[ev.Action, ...] = ()


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
            return _begin(_move(job, event, Condition.ALWAYS), "the job begins")
        case ev.WorkerStarted():
            return _worker_started(job, event)
        case ev.StartFailed():
            return _start_failed(job, event)
        case ev.WorkerExited():
            return _worker_exited(job, event)
        case ev.StopRequested():
            return _stop_requested(job, event)
        case ev.SignalReceived():
            moved = _move(job, event, Condition.ALWAYS)
            why = f"msrun received {_name(event.signum)}, which is for the workers"
            return Decision(moved, _signal(moved.having(RankState.RUNNING), event.signum, why))
        case ev.DeadlinePassed():
            return _deadline_passed(job, event)


def _is_stale(job: Job, event: ev.Event) -> bool:
    match event:
        case ev.DeadlinePassed():
            return event.attempt != job.attempt or event.state is not job.state
        case ev.WorkerStarted() | ev.StartFailed():
            return event.attempt != job.attempt or job.ranks[event.rank] is not RankState.PENDING
        case ev.WorkerExited():
            return event.attempt != job.attempt or not job.ranks[event.rank].is_alive
        case _:
            return False


def _move(job: Job, event: ev.Event, condition: Condition) -> Job:
    return replace(job, state=next_state(job.state, type(event).__name__, condition))


def _with_rank(job: Job, rank: int, state: RankState) -> Job:
    return replace(job, ranks={**job.ranks, rank: state})


def _begin(job: Job, reason: str) -> Decision:
    ranks = dict.fromkeys(job.rules.ranks, RankState.PENDING)
    begun = replace(job, ranks=ranks, failure=None)
    deadline = ev.SetDeadline(JobState.STARTING, job.attempt, job.rules.start_s)
    return Decision(begun, (ev.StartAttempt(job.attempt, reason), deadline))


def _worker_started(job: Job, event: ev.WorkerStarted) -> Decision:
    job = _with_rank(job, event.rank, RankState.RUNNING)
    if job.state is JobState.STARTING:
        awaited = bool(job.having(RankState.PENDING))
        return Decision(
            _move(job, event, Condition.RANKS_AWAITED if awaited else Condition.ALL_STARTED)
        )
    # its start was on the way when the stop was decided
    moved = _move(job, event, Condition.ALWAYS)
    late = signals.SIGKILL if job.state is JobState.KILLING else job.sent_signal
    why = f"rank {event.rank} came to life while the job is {job.state.value}"
    return Decision(moved, _signal((event.rank,), late, why))


def _start_failed(job: Job, event: ev.StartFailed) -> Decision:
    job = _with_rank(job, event.rank, RankState.FAILED)
    reason = f"rank {event.rank} could not be started: {event.why}"
    if job.state is JobState.STARTING:
        job = replace(job, failure=reason)
        if job.alive():
            return _stop(_move(job, event, Condition.RANK_FAILED), signals.SIGTERM, reason)
        return _all_gone(job, event)
    if job.alive():
        return Decision(_move(job, event, Condition.RANKS_ALIVE))
    return _all_gone(job, event)


def _worker_exited(job: Job, event: ev.WorkerExited) -> Decision:
    if job.ranks[event.rank] is RankState.PENDING:  # dead before it was announced
        job = _worker_started(job, ev.WorkerStarted(event.rank, event.attempt, 0)).job
    told = job.state in {JobState.STOPPING, JobState.KILLING}
    if event.exit_code == 0:
        ended = RankState.SUCCEEDED
    else:
        ended = RankState.STOPPED if told else RankState.FAILED
    job = _with_rank(job, event.rank, ended)
    if told:
        if job.alive():
            return Decision(_move(job, event, Condition.RANKS_ALIVE))
        return _all_gone(job, event)
    if ended is RankState.FAILED:
        reason = f"rank {event.rank} {describe_exit(event.exit_code)}"
        job = replace(job, failure=reason)
        if job.alive():
            return _stop(_move(job, event, Condition.RANK_FAILED), signals.SIGTERM, reason)
        return _all_gone(job, event)
    if job.state is JobState.STARTING:
        return Decision(_move(job, event, Condition.RANKS_AWAITED))
    if job.alive():
        return Decision(_move(job, event, Condition.RANKS_ALIVE))
    reason = "every rank left with 0"
    done = _move(job, event, Condition.ALL_SUCCEEDED)
    return Decision(done, (ev.Sweep(reason), ev.Finish(done.state, 0, reason)))


def _stop_requested(job: Job, event: ev.StopRequested) -> Decision:
    name = _name(event.signum)
    match job.state:
        case JobState.STARTING | JobState.RUNNING:
            reason = f"msrun received {name}"
            job = replace(job, stop_signal=event.signum)
            return _stop(_move(job, event, Condition.RANKS_ALIVE), event.signum, reason)
        case JobState.STOPPING if job.stop_signal is None:
            # a failure is being cleared away: no restart any more, and the same grace goes on
            moved = _move(job, event, Condition.FIRST_REQUEST)
            return Decision(replace(moved, stop_signal=event.signum))
        case JobState.STOPPING:
            return _kill(
                _move(job, event, Condition.SECOND_REQUEST), f"msrun received {name} again"
            )
        case _:
            moved = _move(job, event, Condition.ALWAYS)
            first = event.signum if job.stop_signal is None else job.stop_signal
            return Decision(replace(moved, stop_signal=first))


def _deadline_passed(job: Job, event: ev.DeadlinePassed) -> Decision:
    moved = _move(job, event, Condition.ALWAYS)
    match event.state:
        case JobState.STARTING:
            late = _listed(job.having(RankState.PENDING))
            reason = f"{late} did not start within {job.rules.start_s:g} s (--cluster_time_out)"
            return _stop(replace(moved, failure=reason), signals.SIGTERM, reason)
        case JobState.STOPPING:
            left = f"{_listed(job.alive())} still alive {job.rules.grace_s:g} s after the signal"
            return _kill(moved, left)
        case _:
            stuck = f"{_listed(job.alive())} cannot be killed (waited {job.rules.kill_s:g} s)"
            reason = stuck if job.failure is None else f"{job.failure}; {stuck}"
            actions = (ev.Sweep(reason), ev.Finish(moved.state, FAILED_EXIT, reason))
            return Decision(replace(moved, failure=reason), actions)


def _stop(job: Job, signum: int, reason: str) -> Decision:
    job = replace(job, sent_signal=signum)
    actions: tuple[ev.Action, ...] = _signal(job.having(RankState.RUNNING), signum, reason)
    if job.having(RankState.PENDING):
        actions += (ev.CancelStarts(reason),)
    deadline = ev.SetDeadline(JobState.STOPPING, job.attempt, job.rules.grace_s)
    return Decision(job, (*actions, deadline))


def _kill(job: Job, reason: str) -> Decision:
    deadline = ev.SetDeadline(JobState.KILLING, job.attempt, job.rules.kill_s)
    actions: tuple[ev.Action, ...] = _signal(job.having(RankState.RUNNING), signals.SIGKILL, reason)
    if job.having(RankState.PENDING):
        actions += (ev.CancelStarts(reason, now=True),)
    return Decision(job, (*actions, deadline))


def _all_gone(job: Job, event: ev.Event) -> Decision:
    """No rank is alive: restart, fail, or stay stopped."""
    if job.stop_signal is not None:
        reason = f"stopped by {_name(job.stop_signal)}"
        done = _move(job, event, Condition.STOP_WANTED)
        exit_code = SIGNAL_EXIT_BASE + job.stop_signal
        return Decision(done, (ev.Sweep(reason), ev.Finish(done.state, exit_code, reason)))
    failure = job.failure or "unknown"
    if job.attempt < job.rules.max_restarts:
        again = replace(_move(job, event, Condition.BUDGET_LEFT), attempt=job.attempt + 1)
        reason = f"restart {again.attempt} of {job.rules.max_restarts}: {failure}"
        begun = _begin(again, reason)
        return Decision(begun.job, (ev.Sweep(reason), *begun.actions))
    reason = failure
    if job.rules.max_restarts:
        reason += f" (all {job.rules.max_restarts} restarts are spent)"
    done = _move(job, event, Condition.BUDGET_SPENT)
    return Decision(done, (ev.Sweep(reason), ev.Finish(done.state, FAILED_EXIT, reason)))


def _signal(ranks: Sequence[int], signum: int, reason: str) -> tuple[ev.Action, ...]:
    return (ev.SignalRanks(tuple(ranks), signum, reason),) if ranks else ()


def _name(signum: int) -> str:
    try:
        return signals.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def _listed(ranks: Sequence[int]) -> str:
    more = ", ..." if len(ranks) > LISTED else ""
    words = ", ".join(str(rank) for rank in ranks[:LISTED]) + more
    return f"rank{'s' if len(ranks) != 1 else ''} {words}"


def describe_exit(exit_code: int) -> str:
    """An exit code in words: ``was killed by SIGKILL``, ``exited with code 3``."""
    if exit_code < 0:
        return f"was killed by {_name(-exit_code)}"
    return f"exited with code {exit_code}"
