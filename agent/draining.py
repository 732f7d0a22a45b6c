"""From the first failure to the stop of all ranks: what the dump comes to moves the job. Pure."""

from __future__ import annotations

import signal as signals

from agent import dumping
from agent import events as ev
from agent.dump_plan import Turn, renew
from agent.job import Job
from agent.restarts import fate
from agent.state import Condition, JobState
from agent.stopping import Decision, all_gone, move, stop
from agent.words import describe_exit

DRAINING = frozenset({JobState.FREEZING, JobState.DUMPING, JobState.COMMITTING})


def rank_lost(job: Job, event: ev.WorkerExited) -> Decision:
    """A rank ended while the state is saved."""
    words = describe_exit(event.exit_code)
    if event.exit_code and job.is_failure_raised and event.rank not in job.raised:
        failure = f"rank {event.rank} {words} ({job.failure})"
        job = job._replace(failure=failure, is_failure_raised=False)
    match job.state:
        case JobState.FREEZING:
            return take(event, dumping.choose(job))
        case JobState.DUMPING:
            return take(event, dumping.lose(job, event.rank, words))
        case _:
            return Decision(move(job, event, Condition.ALWAYS))


def dump_went_on(job: Job, event: dumping.DumpEvent) -> Decision:
    """News of the present dump, or of one that was given up and is complete after all."""
    match event:
        case ev.RankFrozen():
            job = dumping.note_frozen(job.with_step(event.rank, event.step), event)
            if job.state is JobState.FREEZING:
                return take(event, dumping.choose(job))
            return Decision(job)
        case ev.ShardWritten() | ev.StateDigested():
            return take(event, dumping.hear(job, event))
        case ev.SaveFailed():
            return take(event, dumping.hear_failure(job, event))
        case ev.DumpProgressed():
            moved = move(job, event, Condition.ALWAYS)
            return Decision(moved, (renew(moved, moved.state),))
        case ev.DumpCommitted():
            is_awaited = job.state is JobState.COMMITTING
            job = dumping.note_commit(job, event)
            return drained(job, event, Condition.RANKS_ALIVE) if is_awaited else Decision(job)
        case ev.CommitFailed():
            return take(event, dumping.hear_commit_failure(job, event))


def take(event: ev.Event, turn: Turn) -> Decision:
    """Move by what the dump came to."""
    if turn.condition is Condition.GIVEN_UP:
        return drained(turn.job, event, turn.condition, turn.actions)
    return Decision(move(turn.job, event, turn.condition), turn.actions)


def drained(
    job: Job, event: ev.Event, condition: Condition, actions: tuple[ev.Action, ...] = ()
) -> Decision:
    """The dump is over, in whatever way: stop those that are alive."""
    if job.alive():
        moved = move(job, event, condition)
        after = stop(moved, signals.SIGTERM, f"{job.failure}{fate(job)}")
    else:
        after = all_gone(job, event)
    return Decision(after.job, actions + after.actions)
