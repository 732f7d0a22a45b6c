"""The dump's part of the decisions: freeze, choose a step, write, compare, commit.

Pure, like the controller, which asks here and moves the job by the answer. Theory in five lines:

* only ranks that said they are whole at one step write it, and all of a dump is of that step;
* every holder's digest is compared before the commit: the majority is right; without one, all
  that differs is kept;
* a writer that fails is replaced by another holder and never asked again, a folder that fails by
  the next place; both are finite, so a dump ends;
* an order to write replaces the one before it, answers to which no longer count;
* a dump that was begun is either committed or abandoned, with the reason in words.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.dump_steps import (
    UNSAVED,
    Turn,
    advance,
    close_dump,
    commit_memory,
    describe_loss,
    drop_writers,
    give_up,
    leave_memory,
    order_all,
    problems,
    reassign,
)
from agent.controller.job import DumpProgress, Job
from agent.controller.replaceable import counted, excused, ranks_to_replace, why_not
from agent.controller.states import Condition, JobState, RankState
from agent.text.wording import described, listed

CHANGED = "said two different things about one step"


def freeze(job: Job, reason: str, freeze_s: float | None = None) -> Turn:
    """Begin: whoever can be asked stands still. Somebody must be reachable."""
    ranks = job.reachable()
    within_s = job.rules.freeze_s if freeze_s is None else freeze_s
    dump = DumpProgress(1 if job.dump is None else job.dump.id + 1, ranks, within_s)
    actions = (
        do.FreezeRanks(ranks, dump.id, reason),
        do.SetDeadline(JobState.FREEZING, job.attempt, within_s),
    )
    return Turn(job._replace(dump=dump), Condition.STATE_HELD, actions)


def note_frozen(job: Job, event: ev.RankFrozen) -> Job:
    """A rank stands still. One that says so late may still stand in for another."""
    dump = _dump(job)
    return job._replace(dump=dump._replace(answers={**dump.answers, event.rank: event}))


def choose(job: Job, *, is_late: bool = False) -> Turn:
    """While freezing: once all have answered, or it is too late, the newest whole step."""
    dump = _dump(job)
    reachable = job.reachable()
    if not is_late and any(rank in reachable and rank not in dump.answers for rank in dump.asked):
        return Turn(job, Condition.ANSWERS_AWAITED)
    answers = [dump.answers[rank] for rank in reachable if rank in dump.answers]
    whole = [answer.step for answer in answers if answer.is_whole]
    if not whole:
        return give_up(job, dump, f"no rank holds it whole: {why_not_whole(job, dump)}")
    step = max(whole)
    gone = ranks_to_replace(job)
    not_replaced = why_not(counted(job, gone, step), gone, step)
    if not not_replaced:
        dump = dump._replace(step=step, place=do.MEMORY)
    elif step <= max(job.saved_step, 0):
        nothing = "no step was committed yet, there is nothing to save"
        job = excused(job, not_replaced if step > 0 else "")
        return close_dump(job, dump, job.kept() or nothing)
    elif not job.saves():
        return give_up(excused(job, not_replaced), dump._replace(step=step), UNSAVED)
    dump = dump._replace(step=step)
    why = f"step {step} is the newest that a rank holds whole"
    turn = order_all(excused(job, not_replaced), dump, why)._replace(condition=Condition.WHOLE)
    return turn if not_replaced else _prepare(turn, gone)


def _prepare(turn: Turn, gone: Iterable[int]) -> Turn:
    """Whoever will be replaced, unless something comes between, need not wait for the memory."""
    dead = tuple(rank for rank in gone if not turn.job.ranks[rank].is_alive)
    if not dead:
        return turn
    why = f"{listed(dead)} will be replaced once the state is in memory"
    prepare = do.PrepareRanks(turn.job.attempt + 1, dead, why)
    return turn._replace(actions=(*turn.actions, prepare))


def hear(job: Job, event: ev.ShardWritten | ev.StateDigested) -> Turn:
    """While dumping: a rank wrote its part, or says what it holds."""
    dump = _dump(job)
    rank, digest = event.rank, event.digest
    is_writer = isinstance(event, ev.ShardWritten)
    if dump.digests.get(rank, digest) != digest:
        return drop_writers(job, dump, (rank,), CHANGED)
    digests = {**dump.digests, rank: digest}
    dump = dump._replace(digests=digests, digesting=dump.digesting - {rank})
    if not is_writer:
        return advance(job, dump)
    dump = dump._replace(writing=dump.writing - {rank})
    if not dump.writing and all(digests[writer] == digest for writer in dump.writers):
        dump = dump._replace(written={**dump.written, digest: dump.writers})
    return advance(job, dump)


def hear_failure(job: Job, event: ev.SaveFailed) -> Turn:
    """While dumping: a rank could not; another one can, or another place."""
    dump = _dump(job)
    # what is complete in a place is not left behind for another place that may be full, too
    if event.is_place and event.rank in dump.writing and not dump.written:
        return _leave_place(job, dump, event.why)
    return drop_writers(job, dump, (event.rank,), f"failed ({event.why})")


def lose(job: Job, rank: int, why: str) -> Turn:
    """While dumping: a rank is gone, or cannot be reached any more."""
    return drop_writers(job, _dump(job), (rank,), why)


def lose_patience(job: Job) -> Turn:
    """While dumping: nothing moved for too long. The writers are to blame, or else the others.

    When a second writer is stuck in a place, that is to blame, too.
    """
    dump = _dump(job)
    why = f"made no progress in {job.rules.dump_s:g} s"
    if dump.writing:
        is_second = dump.is_slow and not dump.written
        if is_second and dump.place == do.MEMORY:
            return leave_memory(job, dump, "nothing moves there")
        if is_second and dump.place + 1 < job.rules.places:
            dump = _elsewhere(dump, "nothing moves there")
        else:
            dump = dump._replace(is_slow=True)
    return drop_writers(job, dump, dump.writing or dump.digesting, why)


def note_commit(job: Job, event: ev.DumpCommitted) -> Job:
    """The dump is complete, even if that is heard after it was given up."""
    dump = _dump(job)._replace(is_committed=True)
    job = job._replace(dump=dump, resume=event.path, saved_step=dump.step)
    if job.state in {JobState.COMMITTING, JobState.STOPPING, JobState.KILLING}:
        return job._replace(outcome=f"{job.kept()}{dump.remark}")
    return job  # the next attempt has begun


def hear_commit_failure(job: Job, event: ev.CommitFailed) -> Turn:
    """While committing: everything again in the next place, or the end of it."""
    dump = _dump(job)._replace(is_ordered=False)
    if dump.place == do.MEMORY:
        return leave_memory(job, dump, event.why)
    if job.memory is not None and event.is_place and dump.place + 1 < job.rules.places:
        dump = _elsewhere(dump, event.why)
        return commit_memory(job, dump, dump.place, problems(dump))
    if job.memory is not None:
        return give_up(job, dump, problems(dump._replace(full=(*dump.full, event.why))))
    if not event.is_place:
        return give_up(job, dump, f"its manifest failed ({event.why})")
    return _leave_place(job, dump, event.why)


def give_up_commit(job: Job) -> Turn:
    """While committing: nothing moved for too long."""
    return give_up(job, _dump(job), f"its commit made no progress in {job.rules.dump_s:g} s")


def abandon(job: Job, why: str) -> Turn:
    """At any time: no more of it."""
    return give_up(job, _dump(job), why)


def record_lost_step(job: Job) -> Job:
    """Nobody can be asked: say so before the ranks' ends hide why."""
    why = f"no rank can be asked: {why_not_whole(job)}"
    return job._replace(outcome=describe_loss(job, job.newest_step(), why))


def why_not_whole(job: Job, dump: DumpProgress | None = None) -> str:
    """Every rank with the reason why it cannot save the state; ``dump``: the answers it got."""

    def fact(rank: int) -> str:
        answer = None if dump is None else dump.answers.get(rank)
        if job.ranks[rank] is not RankState.RUNNING:
            return "ended"
        if rank not in job.guarded:
            return "registered no state"
        if rank in job.unreachable:
            return "let go of its state"
        if answer is None:
            within_s = job.rules.freeze_s if dump is None else dump.freeze_s
            return f"did not answer within {within_s:.3g} s"
        return f"cannot save it ({answer.why or 'torn'})"

    return described((rank, fact(rank)) for rank in job.ranks)


def is_news(job: Job, event: DumpEvent) -> bool:
    """Whether an event is about the present dump, awaited, and was not heard before."""
    dump, state = job.dump, job.state
    if dump is None or event.dump_id != dump.id:
        return False
    match event:
        case ev.DumpCommitted():  # on disk, after the dump was given up, it is as good as any
            is_awaited = state is JobState.COMMITTING or dump.place != do.MEMORY
            is_known = dump.is_committed or event.path == dump.memory
            return dump.is_ordered and is_awaited and not is_known
        case ev.CommitFailed():
            return state is JobState.COMMITTING
        case ev.RankFrozen(rank=rank):
            # late, it may still help out
            is_due = state in {JobState.HOLDING, JobState.FREEZING, JobState.DUMPING}
            return is_due and rank in dump.asked and rank not in dump.answers
        case ev.RankStanding(rank=rank):
            is_known = job.exit is None or rank in job.exit.standing
            return state is JobState.HOLDING and rank in dump.asked and not is_known
        case ev.DumpProgressed() if state is JobState.COMMITTING:
            return True
        case ev.ShardWritten(rank=rank) | ev.SaveFailed(rank=rank) if rank in dump.writing:
            return state is JobState.DUMPING and event.round == dump.round
        case ev.StateDigested(rank=rank) | ev.SaveFailed(rank=rank):
            is_old = event.round is not None and event.round < dump.since
            return state is JobState.DUMPING and rank in dump.digesting and not is_old
        case ev.DumpProgressed(rank=rank):
            return state is JobState.DUMPING and rank in dump.writing | dump.digesting
        case _:
            return False


DumpEvent = (
    ev.RankStanding
    | ev.RankFrozen
    | ev.ShardWritten
    | ev.StateDigested
    | ev.SaveFailed
    | ev.DumpProgressed
    | ev.DumpCommitted
    | ev.CommitFailed
)


def _leave_place(job: Job, dump: DumpProgress, why: str) -> Turn:
    if dump.place == do.MEMORY:
        return leave_memory(job, dump, why)
    dump = _elsewhere(dump, why)
    if dump.place < job.rules.places:
        return reassign(job, dump)
    return give_up(job, dump, problems(dump))


def _elsewhere(dump: DumpProgress, why: str) -> DumpProgress:
    return dump._replace(place=dump.place + 1, full=(*dump.full, why), written={}, is_slow=False)


def _dump(job: Job) -> DumpProgress:
    assert job.dump is not None
    return job.dump
