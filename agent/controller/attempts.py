"""An attempt begins, is stopped, is killed; and what follows when no rank is alive.

Pure. Every move goes through the table; nothing is ordered for a rank that is not alive.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.job import NEVER, ExitProgress, Job
from agent.controller.restart_policy import decide_restart
from agent.controller.states import Condition, JobState, RankState, next_state
from worker_hooks.contract import protocol

FAILED_EXIT = 1
REFUSED_EXIT = 2  # as for every other request that cannot be met
SIGNAL_EXIT_BASE = 128  # the shell's convention: 128 + signal
INTERRUPTS = frozenset({signals.SIGINT, signals.SIGQUIT})  # somebody sits at the keyboard


@dataclass(frozen=True, slots=True)
class Decision:
    """The job after an event, what to do, and whether the event was only noted."""

    job: Job
    actions: tuple[do.Action, ...] = ()


def move(job: Job, event: ev.Event, condition: Condition) -> Job:
    """The job in the state that the table names.

    Raises:
        KeyError: it names none.
    """
    return job._replace(state=next_state(job.state, ev.row(event), condition))


def forgotten(job: Job) -> Job:
    """The job once what the ranks of the present attempt told is of no use any more."""
    return job._replace(
        failure=None,
        is_failure_raised=False,
        guarded={},
        raised=frozenset(),
        first_raised=None,
        hung=frozenset(),
        unreachable=frozenset(),
        outcome="",
    )


def begin(job: Job, reason: str) -> Decision:
    """Start every rank; what the last attempt's ranks told is forgotten."""
    begun = forgotten(job)._replace(
        ranks=dict.fromkeys(job.rules.ranks, RankState.PENDING),
        exit=None,
        not_replaced="",
        why_fixed={},
        reached=NEVER,
        replacement=None,
    )
    deadline = do.SetDeadline(JobState.STARTING, job.attempt, job.rules.start_s)
    return Decision(begun, (do.StartAttempt(job.attempt, reason, job.resume), deadline))


def stop(job: Job, signum: int, reason: str) -> Decision:
    """Ask ranks to leave; those held at their top leave with their own traceback and code.

    Those that are refused leave by themselves.
    """
    job = job._replace(sent_signal=signum)
    running = job.having(RankState.RUNNING)
    asked = [rank for rank in running if rank not in job.raised | job.refused]
    held = tuple(rank for rank in running if rank in job.raised)
    actions: tuple[do.Action, ...] = signal_ranks(asked, signum, reason)
    if held:
        actions += (release(held, reason),)
    if job.having(RankState.PENDING):
        actions += (do.CancelStarts(reason),)
    return Decision(job, (*actions, _patience(job, job.rules.grace_s)))


def _patience(job: Job, seconds: float) -> do.SetDeadline:
    return do.SetDeadline(JobState.STOPPING, job.attempt, seconds)


def leave(job: Job, exit_: ExitProgress, reason: str) -> Decision:
    """Let ranks that stay at one step end with 0; those that cannot be told so are signalled."""
    job = job._replace(sent_signal=signals.SIGTERM)
    told = tuple(rank for rank in job.reachable() if rank not in job.raised)
    actions: tuple[do.Action, ...] = ()
    if told:
        assert job.dump is not None
        message = protocol.Leave(job.dump.id, exit_.step, reason)
        actions = (do.Tell(told, message, reason),)
    held = tuple(rank for rank in job.having(RankState.RUNNING) if rank in job.raised)
    rest = [rank for rank in job.having(RankState.RUNNING) if rank not in {*told, *held}]
    actions += signal_ranks(rest, signals.SIGTERM, reason)
    if held:
        actions += (release(held, reason),)
    job = job._replace(exit=exit_._replace(leaving=frozenset(told)))
    return Decision(job, (*actions, _patience(job, leave_s(job))))


def leave_s(job: Job) -> float:
    """Seconds that ranks have to leave by themselves: they may still write files of their own."""
    return max(job.rules.grace_s, 0.0 if job.exit is None else job.exit.grace_s)


def kill(job: Job, reason: str) -> Decision:
    """No more asking."""
    deadline = do.SetDeadline(JobState.KILLING, job.attempt, job.rules.kill_s)
    actions: tuple[do.Action, ...] = signal_ranks(
        job.having(RankState.RUNNING), signals.SIGKILL, reason
    )
    if job.having(RankState.PENDING):
        actions += (do.CancelStarts(reason, now=True),)
    return Decision(job, (*actions, deadline))


def succeed(job: Job, event: ev.Event) -> Decision:
    """The last rank left with 0, like all others, and nobody had to tell it."""
    reason = "every rank left with 0"
    done = move(job, event, Condition.ALL_SUCCEEDED)
    return Decision(done, (do.Sweep(reason), do.Finish(done.state, 0, reason)))


def all_gone(job: Job, event: ev.Event) -> Decision:
    """No rank is alive: restart, fail, or stay stopped."""
    job, condition, reason = decide_restart(job)
    moved = move(job, event, condition)
    if condition is Condition.BUDGET_LEFT:
        begun = begin(_next(moved), reason)
        return Decision(begun.job, (do.Sweep(reason), *begun.actions))
    return Decision(moved, (do.Sweep(reason), do.Finish(moved.state, _exit_code(job), reason)))


def _next(job: Job) -> Job:
    return job._replace(attempt=job.attempt + 1, restarts=job.restarts + 1)


def _exit_code(job: Job) -> int:
    """After a stop the shell's, unless all left gracefully; an interrupt ends a script's loops."""
    if not job.asked:
        return REFUSED_EXIT if job.refusal else FAILED_EXIT
    if job.left_well() and job.stop_signal not in INTERRUPTS:
        return 0
    return SIGNAL_EXIT_BASE + (signals.SIGTERM if job.stop_signal is None else job.stop_signal)


def release(ranks: tuple[int, ...], reason: str) -> do.Tell:
    """Let ranks that are held at their top exit, each with its own traceback and code."""
    return do.Tell(ranks, protocol.Release(reason), reason)


def signal_ranks(ranks: Sequence[int], signum: int, reason: str) -> tuple[do.Action, ...]:
    """The action, unless there is nobody to signal."""
    return (do.SignalRanks(tuple(ranks), signum, reason),) if ranks else ()
