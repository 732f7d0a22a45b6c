"""An attempt begins, is stopped, is killed; and what follows when no rank is alive.

Pure. Every move goes through the table; nothing is ordered for a rank that is not alive.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Collection
from typing import NamedTuple

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.job import NEVER, Attempt, ExitProgress, Job, SinceRestart
from agent.controller.restart_policy import decide_restart
from agent.controller.states import Condition, JobState, RankState, next_state
from agent.ranks.rank_states import RankStates
from agent.text.tone import Tone
from worker_hooks.contract import protocol

FAILED_EXIT = 1
REFUSED_EXIT = 2  # as for every other request that cannot be met
SIGNAL_EXIT_BASE = 128  # the shell's convention: 128 + signal
INTERRUPTS = frozenset({signals.SIGINT, signals.SIGQUIT})  # somebody sits at the keyboard


class Decision(NamedTuple):
    """The job after an event, what to do, and one sentence that people are to hear, if any."""

    job: Job
    actions: tuple[do.Action, ...] = ()
    say: str = ""
    tone: Tone = Tone.PLAIN  # of that sentence


def move(job: Job, event: ev.Event, condition: Condition) -> Job:
    """The job in the state that the table names.

    Raises:
        KeyError: it names none.
    """
    state = next_state(job.state, ev.row(event), condition)
    return job if state is job.state else job._replace(state=state)


def begin(job: Job, reason: str) -> Decision:
    """Start every rank; nothing that the last attempt's ranks said counts any more."""
    job, given_up = give_up_devices(job, job.policy.ranks)
    begun = job._replace(
        ranks=RankStates(dict.fromkeys(job.policy.ranks, RankState.PENDING)),
        now=Attempt(),
        since_restart=SinceRestart(),
    )
    deadline = do.SetDeadline(JobState.STARTING, job.attempt, job.policy.timeouts.start_s)
    start = do.StartAttempt(job.attempt, reason, job.resume, job.devices.visible, job.shadows.step)
    return Decision(begun, (*given_up, start, deadline))


def give_up_devices(job: Job, ranks: Collection[int]) -> tuple[Job, tuple[do.Action, ...]]:
    """The job once successors of ``ranks`` are ordered: only now spare devices are used up."""
    devices, said = job.devices.renewed(ranks)
    if not said:
        return job, ()
    new = devices.given_up[len(job.devices.given_up) :]
    return job._replace(devices=devices), (do.GiveUpDevices(new, said),)


def stop(job: Job, signum: int, reason: str) -> Decision:
    """Ask the ranks to exit.

    Those that are held at their top exit with their own traceback and code; those that were
    refused a checkpoint exit by themselves.
    """
    now = job.now._replace(sent_signal=signum)
    running = job.having(RankState.RUNNING)
    signalled, held = running - now.raised - now.refused, running & now.raised
    actions = signal_ranks(signalled, signum, reason) + release(tuple(held), reason)
    if job.having(RankState.PENDING):
        actions += (do.CancelStarts(reason),)
    grace_s = job.policy.timeouts.grace_s
    return Decision(job._replace(now=now), (*actions, _stopping_deadline(job, grace_s)))


def _stopping_deadline(job: Job, seconds: float) -> do.SetDeadline:
    return do.SetDeadline(JobState.STOPPING, job.attempt, seconds)


def leave(job: Job, exit_: ExitProgress, reason: str) -> Decision:
    """Let ranks that stay at one step exit with 0; those without a link are signalled."""
    now = job.now
    leaving = job.reachable() - now.raised
    actions: tuple[do.Action, ...] = ()
    if leaving:
        message = protocol.Leave(job.present_dump().id, exit_.step, reason)
        actions = (do.Tell(tuple(leaving), message, reason),)
    running = job.having(RankState.RUNNING)
    held = running & now.raised
    rest = running - leaving - held
    actions += signal_ranks(rest, signals.SIGTERM, reason) + release(tuple(held), reason)
    exit_ = exit_._replace(leaving=leaving)
    job = job._replace(now=now._replace(sent_signal=signals.SIGTERM, exit=exit_))
    return Decision(job, (*actions, _stopping_deadline(job, leave_s(job))))


def leave_s(job: Job) -> float:
    """Seconds that ranks have to exit by themselves: they may still write files of their own."""
    grace_s = job.policy.timeouts.grace_s
    return grace_s if job.now.exit is None else max(grace_s, job.now.exit.grace_s)


def kill(job: Job, reason: str) -> Decision:
    """No more asking."""
    deadline = do.SetDeadline(JobState.KILLING, job.attempt, job.policy.timeouts.kill_s)
    actions = signal_ranks(job.having(RankState.RUNNING), signals.SIGKILL, reason)
    if job.having(RankState.PENDING):
        actions += (do.CancelStarts(reason, now=True),)
    return Decision(job, (*actions, deadline))


def succeed(job: Job, event: ev.Event) -> Decision:
    """The last rank exited with 0, like all others, and no rank was ordered to."""
    reason = "every rank exited with 0"
    done = move(job, event, Condition.ALL_SUCCEEDED)
    return Decision(done, (do.Sweep(reason), do.Finish(done.state, 0, reason)))


def all_gone(job: Job, event: ev.Event) -> Decision:
    """No rank is alive: restart, fail, or stay stopped."""
    job, condition, reason = decide_restart(job)
    moved = move(job, event, condition)
    if condition is Condition.BUDGET_LEFT:
        again = moved._replace(attempt=job.attempt + 1, failed=job.now.failure or "")
        if job.shadows.step != NEVER:
            begun = begin(again._replace(replaced=again.replaced + 1), reason)
            aged = do.RemindReplaced(job.policy.replace.period_s)
            return Decision(begun.job, (do.Sweep(reason), *begun.actions, aged))
        begun = begin(again._replace(restarts=job.restarts + 1), reason)
        return Decision(begun.job, (do.Sweep(reason), *begun.actions))
    return Decision(moved, (do.Sweep(reason), do.Finish(moved.state, _exit_code(job), reason)))


def _exit_code(job: Job) -> int:
    """After a stop the shell's, unless all exited gracefully; an interrupt ends loops."""
    stop = job.stop
    if not stop.why:
        return REFUSED_EXIT if job.now.refusal else FAILED_EXIT
    if job.left_well() and stop.signum not in INTERRUPTS:
        return 0
    return SIGNAL_EXIT_BASE + (signals.SIGTERM if stop.signum is None else stop.signum)


def release(ranks: tuple[int, ...], reason: str) -> tuple[do.Action, ...]:
    """The order by which ranks that are held at their top exit, if there are such ranks."""
    return (do.Tell(ranks, protocol.Release(reason), reason),) if ranks else ()


def signal_ranks(ranks: Collection[int], signum: int, reason: str) -> tuple[do.Action, ...]:
    """The action, if there is a rank to signal."""
    return (do.SignalRanks(tuple(ranks), signum, reason),) if ranks else ()
