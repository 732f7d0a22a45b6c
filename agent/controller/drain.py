"""From the first failure, or a request to stop, to the stop of all ranks. Pure.

What the dump and the graceful exit come to, moves the job.
"""

from __future__ import annotations

import signal as signals

from agent.controller import actions as do
from agent.controller import dump, graceful_exit, replacement
from agent.controller import events as ev
from agent.controller.attempts import Decision, all_gone, leave, move, stop, succeed
from agent.controller.dump import Turn, extend_deadline
from agent.controller.job import Job
from agent.controller.restart_policy import describe_outcome
from agent.controller.states import Condition, JobState
from agent.text.wording import describe_exit
from worker_hooks.contract import protocol

DRAINING = frozenset({JobState.FREEZING, JobState.DUMPING, JobState.COMMITTING})


def rank_lost(job: Job, event: ev.WorkerExited) -> Decision:
    """A rank ended while the state is saved, or before all stay at one step."""
    words = describe_exit(event.exit_code)
    if event.exit_code and job.failure is None:  # until now only a stop was asked for
        job = job._replace(failure=f"rank {event.rank} {words}")
    if event.exit_code and job.is_failure_raised and event.rank not in job.raised:
        failure = f"rank {event.rank} {words} ({job.failure})"
        job = job._replace(failure=failure, is_failure_raised=False)
    match job.state:
        case JobState.HOLDING if event.exit_code:
            return interrupt_hold(job, event, f"rank {event.rank} {words}")
        case JobState.HOLDING:  # its training is over
            return apply(event, graceful_exit.agree(job)) if job.alive() else succeed(job, event)
        case JobState.FREEZING:
            return apply(event, dump.choose(job))
        case JobState.DUMPING:
            return apply(event, dump.lose(job, event.rank, words))
        case _:
            return Decision(move(job, event, Condition.ALWAYS))


def dump_went_on(job: Job, event: dump.DumpEvent) -> Decision:
    """News of the present dump, or of one that was given up and is complete after all."""
    match event:
        case protocol.Standing():
            return apply(event, graceful_exit.hear_standing(job, event))
        case protocol.Frozen() if job.state is JobState.HOLDING:
            return _came_to_stay(job, event)
        case protocol.Frozen():
            job = dump.note_frozen(job.with_step(event.rank, event.step), event)
            if job.state is JobState.FREEZING:
                return apply(event, dump.choose(job))
            return Decision(job)
        case protocol.Written() | protocol.Digested():
            return apply(event, dump.hear(job, event))
        case protocol.SaveFailed():
            return apply(event, dump.hear_failure(job, event))
        case protocol.Progress() | ev.DumpProgressed():
            moved = move(job, event, Condition.ALWAYS)
            return Decision(moved, (extend_deadline(moved, moved.state),))
        case ev.DumpCommitted():
            return _committed(job, event)
        case ev.CommitFailed():
            return apply(event, dump.hear_commit_failure(job, event))


def _committed(job: Job, event: ev.DumpCommitted) -> Decision:
    if job.dump is not None and job.dump.place == do.MEMORY:
        return apply(event, replacement.begin(job, event.path))
    is_awaited = job.state is JobState.COMMITTING
    job = dump.note_commit(job, event)
    return drained(job, event, Condition.RANKS_ALIVE) if is_awaited else Decision(job)


def _came_to_stay(job: Job, event: protocol.Frozen) -> Decision:
    if graceful_exit.is_elsewhere(job, event):
        fact = f"stays at step {event.step}"
        if not event.is_whole:
            fact = f"cannot save step {event.step} ({event.why or 'torn'})"
        return interrupt_hold(job, event, f"rank {event.rank} {fact}")
    job = dump.note_frozen(job.with_step(event.rank, event.step), event)
    return apply(event, graceful_exit.agree(job))


def interrupt_hold(job: Job, event: ev.Event, why: str) -> Decision:
    """While holding: no graceful exit any more; save what is whole at once, then stop."""
    if job.reachable():
        return apply(event, graceful_exit.interrupt(job, why))
    job = graceful_exit.mark_interrupted(job, why)
    if job.has_news():
        job = dump.record_lost_step(job)
    return drained(job, event, Condition.GIVEN_UP)


def apply(event: ev.Event, turn: Turn) -> Decision:
    """Move by what the dump came to."""
    if turn.condition is Condition.GIVEN_UP:
        return drained(turn.job, event, turn.condition, turn.actions)
    return Decision(move(turn.job, event, turn.condition), turn.actions)


def drained(
    job: Job, event: ev.Event, condition: Condition, actions: tuple[do.Action, ...] = ()
) -> Decision:
    """The dump is over, in whatever way: stop those that are alive, or let them leave."""
    if job.alive():
        moved = move(job, event, condition)
        if job.exit is not None and job.exit.is_held:
            after = leave(moved, job.exit, f"graceful exit: {job.exit.why}{describe_outcome(job)}")
        else:
            after = stop(
                moved, signals.SIGTERM, f"{job.failure or job.asked}{describe_outcome(job)}"
            )
    else:
        after = all_gone(job, event)
    return Decision(after.job, actions + after.actions)
