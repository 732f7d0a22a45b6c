"""From the first failure, or a request to stop, to the stop of all ranks. Pure.

The results of the dump and of the graceful exit move the job.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable
from itertools import takewhile
from operator import attrgetter

from agent.controller import actions as do
from agent.controller import dump, graceful_exit, replacement
from agent.controller import events as ev
from agent.controller.attempts import Decision, all_gone, leave, move, signal_ranks, stop, succeed
from agent.controller.dump import Turn, extend_deadline
from agent.controller.job import NEVER, DumpProgress, Job, MemoryState
from agent.controller.replaceable import blame_left_amid, note_raised
from agent.controller.replication import (
    is_kept_next,
    kept_state,
    parts_in,
    seat_of,
    unsaved_copy,
)
from agent.controller.restart_policy import describe_outcome
from agent.controller.states import Condition, JobState, RankState
from agent.ranks.rank_set import RankSet
from agent.ranks.rows import due_in
from agent.text.wording import describe_exit
from worker_hooks.contract import protocol
from worker_hooks.contract.peer_lost import says_peer_lost, with_consequence

DRAINING = frozenset({JobState.FREEZING, JobState.DUMPING, JobState.COMMITTING})


def rank_lost(job: Job, event: ev.WorkerExited) -> Decision:
    """A rank ended while the state is saved, or before all stay at one step."""
    how = describe_exit(event.exit_code, event.error)
    failure = job.now.failure
    if event.exit_code and failure is None:  # until now only a stop was asked for
        job = job.with_failure(f"rank {event.rank} {how}")
    elif event.exit_code and job.now.is_failure_raised and event.rank not in job.now.raised:
        job = job.with_failure(with_consequence(f"rank {event.rank} {how}", failure or ""))
    elif event.amid and job.now.is_failure_raised and says_peer_lost(failure or ""):
        job, _ = blame_left_amid(job, failure or "")
    match job.state:
        case JobState.HOLDING if event.exit_code:
            return interrupt_hold(job, event, f"rank {event.rank} {how}")
        case JobState.HOLDING:  # its training is over
            return apply(event, graceful_exit.agree(job)) if job.alive() else succeed(job, event)
        case JobState.FREEZING:
            return apply(event, dump.choose(job))
        case JobState.DUMPING:
            return apply(event, dump.note_loss(job, event.rank, how))
        case _:
            return Decision(move(job, event, Condition.ALWAYS))


def is_stale(job: Job, event: dump.DumpEvent) -> bool:  # noqa: C901  a row for each kind of event
    """Whether an event is of another dump, not awaited (any more), or already known."""
    known, state = job.dump, job.state
    if known is None or event.dump_id != known.id:
        return True
    is_due = False
    match event:
        case ev.DumpCommitted():
            # a dump on disk that completes after it was given up is as good as any other
            is_awaited = state is JobState.COMMITTING or known.place != do.MEMORY
            is_known = known.is_committed or event.path == known.memory
            is_due = known.is_ordered and is_awaited and not is_known
        case ev.CommitFailed():
            is_due = state is JobState.COMMITTING
        case protocol.Standing(rank=rank):
            is_known = job.now.exit is None or rank in job.now.exit.standing
            is_due = state is JobState.HOLDING and rank in known.asked and not is_known
        case protocol.Frozen():
            is_due = _is_awaited(known, state, event)
        case ev.DumpProgressed() if state is JobState.COMMITTING:
            is_due = True
        case protocol.Progress() if state is JobState.COMMITTING:
            is_due = event.attempt == job.attempt  # the dump may be that of an earlier attempt
        case ev.DumpProgressed():
            is_due = state is JobState.DUMPING and bool(known.writing)
        case protocol.Progress(rank=rank):
            is_asked = not (known.writing | known.digesting).isdisjoint(parts_in(job).of_rank(rank))
            is_due = state is JobState.DUMPING and is_asked
        case protocol.Written() | protocol.SaveFailed() if seat_of(job, event) in known.writing:
            is_due = state is JobState.DUMPING and event.round == known.round
        case protocol.Digested() | protocol.SaveFailed():
            is_awaited = seat_of(job, event) in known.digesting and event.round >= known.since
            is_due = state is JobState.DUMPING and is_awaited
        case protocol.Written():
            pass
    return not is_due


def _is_awaited(known: DumpProgress, state: JobState, event: protocol.Frozen) -> bool:
    """Whether a rank says so for the first time, or once more because it was let go on."""
    if event.rank in known.behind:
        return state is JobState.FREEZING and event.limit >= known.reach
    # a late one may still stand in for another
    is_open = state in {JobState.HOLDING, JobState.FREEZING, JobState.DUMPING}
    return is_open and event.rank in known.asked and event.rank not in known.answers


def absorb_frozen(job: Job, answers: Iterable[protocol.Frozen]) -> tuple[Job, int]:
    """While freezing: take first answers, as long as others have to come.

    Returns:
        The job after them, and how many it has taken.
    """
    known = job.dump
    if job.state is not JobState.FREEZING or known is None or known.reach != NEVER:
        return job, 0
    of_it = takewhile(lambda one: one.dump_id == known.id, answers)
    due = known.asked - known.answers.ranks
    taken = due_in(of_it, attrgetter("rank"), due, due & job.reachable())
    job = job.with_steps({rank: answer.step for rank, answer in taken.items()})
    answers_now = known.answers.with_all(taken)
    return job._replace(dump=known._replace(answers=answers_now)), len(taken)


def absorb_raised(job: Job, news: Iterable[protocol.Raised]) -> tuple[Job, int]:
    """While the state is saved after a failure: take the exceptions of ranks that miss a peer.

    Returns:
        The job after them, and how many it has taken.
    """
    if job.state not in DRAINING or job.now.failure is None:
        return job, 0
    present = takewhile(lambda one: one.attempt == job.attempt, news)
    taken = due_in(present, attrgetter("rank"), job.having(RankState.RUNNING) - job.now.raised)
    return note_raised(job, taken.values()), len(taken)


def absorb_digests(job: Job, answers: Iterable[protocol.Digested]) -> tuple[Job, int]:
    """While dumping: take what ranks hold, as long as more is awaited then; as the above.

    It is a sign of progress, which the caller has to note.
    """
    known = job.dump
    if job.state is not JobState.DUMPING or known is None or not (known.writing or known.writers):
        return job, 0
    of_it = takewhile(lambda one: one.dump_id == known.id and one.round >= known.since, answers)
    owing = None if known.writing else known.digesting
    parts, due = parts_in(job), known.digesting - known.digests.ranks
    taken = due_in(of_it, lambda one: parts.seat(one.rank, one.share), due, owing)
    digests = known.digests.with_all({seat: one.digest for seat, one in taken.items()})
    digesting = known.digesting - RankSet(taken)
    return job._replace(dump=known._replace(digests=digests, digesting=digesting)), len(taken)


def hear_of_dump(job: Job, event: dump.DumpEvent) -> Decision:
    """News of the present dump, or of one that was given up and is complete after all."""
    match event:
        case protocol.Standing():
            return apply(event, graceful_exit.note_standing(job, event))
        case protocol.Frozen():
            return _frozen(job, event)
        case protocol.Written() | protocol.Digested():
            return apply(event, dump.note_answer(job, event))
        case protocol.SaveFailed():
            return apply(event, dump.note_failure(job, event))
        case protocol.Progress() | ev.DumpProgressed():
            moved = move(job, event, Condition.ALWAYS)
            return Decision(moved, (extend_deadline(moved, moved.state),))
        case ev.DumpCommitted():
            return _committed(job, event)
        case ev.CommitFailed():
            return apply(event, dump.note_commit_failure(job, event))


def _frozen(job: Job, event: protocol.Frozen) -> Decision:
    if job.state is JobState.HOLDING and graceful_exit.is_elsewhere(job, event):
        fact = f"stays at step {event.step}"
        if not event.is_whole:
            fact = f"cannot save step {event.step} ({event.why or 'torn'})"
        return interrupt_hold(job, event, f"rank {event.rank} {fact}")
    job = dump.note_frozen(job, event)
    if job.state is JobState.HOLDING:
        return apply(event, graceful_exit.agree(job))
    if job.state is JobState.FREEZING:
        return apply(event, dump.choose(job))
    return Decision(job)


def _committed(job: Job, event: ev.DumpCommitted) -> Decision:
    if job.present_dump().place == do.MEMORY:
        return apply(event, replacement.begin(job, event.path, event.stale))
    is_awaited = job.state is JobState.COMMITTING
    job = dump.note_commit(job, event)
    return drained(job, event, Condition.RANKS_ALIVE) if is_awaited else Decision(job)


def interrupt_hold(job: Job, event: ev.Event, why: str) -> Decision:
    """While holding: the exit is not graceful any more; save what is whole at once, then stop."""
    if job.reachable():
        return apply(event, graceful_exit.interrupt(job, why))
    job = graceful_exit.mark_interrupted(job, why)
    if job.has_news():
        job = dump.note_lost_step(job)
    return give_up(job, event)


def apply(event: ev.Event, turn: Turn) -> Decision:
    """Move the job by the result of its dump, exit or replacement."""
    if turn.condition is Condition.GIVEN_UP:
        return give_up(turn.job, event, turn.actions)
    return Decision(move(turn.job, event, turn.condition), turn.actions)


def give_up(job: Job, event: ev.Event, actions: tuple[do.Action, ...] = ()) -> Decision:
    """No rank can save the newest step: what is in memory of it, or of an older one, is saved.

    What killed ranks have left is the newest, but there only if none lives: those that hold what
    they cannot save without the dead, or do not answer, are killed, too.
    """
    copy, kept = unsaved_copy(job), kept_state(job)
    if job.state is JobState.COMMITTING:
        tried, is_state = job.present_dump(), isinstance(event, ev.CommitFailed) and event.is_state
        kept = kept_state(job, tried.step) if tried.is_kept and is_state else None
        if not is_state or tried.is_copy:  # no better place is known
            copy = None
    elif is_kept_next(job):  # an older copy is there later, too
        return _kill_to_keep(job, event, actions)
    is_kept = kept is not None and (copy is None or kept.step > copy.step)
    if (memory := kept if is_kept else copy) is None:
        return drained(job, event, Condition.GIVEN_UP, actions)
    turn = write_copy(job, memory, is_kept=is_kept)
    return Decision(move(turn.job, event, turn.condition), actions + turn.actions)


def write_copy(job: Job, copy: MemoryState, *, is_kept: bool = False) -> Turn:
    """Have it written to disk, for which no rank is asked.

    Args:
        job: of which no rank can save as new a step.
        copy: what is in memory.
        is_kept: in that of killed ranks, where it has yet to be read.
    """
    lost = job.now.outcome.removesuffix(f"; {job.kept()}")
    where = "the memory of killed ranks" if is_kept else "a copy in memory"
    saved = dump.new_dump(job)._replace(
        asked=RankSet(),
        step=copy.step,
        memory=copy.path,
        variants=copy.variants,
        is_copy=not is_kept,
        is_kept=is_kept,
        remark=f", from {where}" + f" ({lost})" * (copy.step < job.newest_step()),
    )
    newest = "in the memory of killed ranks" if is_kept else "copy in memory"
    why = f"{lost}; step {copy.step} is the newest {newest}"
    return dump.commit_memory(job._replace(memory=copy, remembers=True), saved, 0, why)


def _kill_to_keep(job: Job, event: ev.Event, actions: tuple[do.Action, ...]) -> Decision:
    """What the others hold lies in their memory, and would change while they exit by themselves."""
    # while training goes on nothing has been tried yet: the first that can be asked is gone
    is_training = job.state is JobState.RUNNING
    moved = move(job, event, Condition.RANK_FAILED if is_training else Condition.GIVEN_UP)
    now = moved.now._replace(is_kept_next=True, sent_signal=signals.SIGKILL)
    why = f"{job.now.failure or job.stop.why}{describe_outcome(job)}"
    killed = signal_ranks(moved.having(RankState.RUNNING), signals.SIGKILL, why)
    deadline = do.SetDeadline(JobState.STOPPING, job.attempt, job.policy.timeouts.grace_s)
    return Decision(moved._replace(now=now), (*actions, *killed, deadline))


def gone(job: Job, event: ev.Event) -> Decision:
    """The last rank is gone: what the memory of all holds is saved, if that was to be read."""
    if not job.now.is_kept_next:
        return all_gone(job, event)
    return give_up(job._replace(now=job.now._replace(is_kept_next=False)), event)


def drained(
    job: Job, event: ev.Event, condition: Condition, actions: tuple[do.Action, ...] = ()
) -> Decision:
    """The dump is over, in whatever way: stop the ranks that are alive, or let them exit."""
    if job.alive():
        moved, now, outcome = move(job, event, condition), job.now, describe_outcome(job)
        if now.exit is not None and now.exit.is_held:
            after = leave(moved, now.exit, f"graceful exit: {now.exit.why}{outcome}")
        else:
            after = stop(moved, signals.SIGTERM, f"{now.failure or job.stop.why}{outcome}")
    else:
        after = all_gone(job, event)
    return Decision(after.job, actions + after.actions)
