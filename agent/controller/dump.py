"""The dump's part of the decisions: freeze, choose a step, write, compare, commit.

Pure, like the controller, which asks here and moves the job by the answer. Theory in a few lines:

* only ranks that said they are whole at one step write it, and all of a dump is of that step;
* every part of the state needs a rank that holds it whole at that step, and is written once; a rank
  that holds several has a *seat* in each (:mod:`agent.ranks.parts`);
* the digests of all holders of a part are compared before the commit: the majority is right;
  without one, all that differs is kept;
* a writer that fails is replaced by another holder and never asked again, a place that fails by
  the next place; both are finite, so a dump ends;
* the memory is a place before all folders; a problem there is no reason to save nothing;
* an order to write replaces the one before it, and answers to the old one no longer count;
* a dump that was begun is either committed or abandoned, with the reason as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.job import NEVER, DumpProgress, Job
from agent.controller.replaceable import not_replacing, ranks_to_replace, why_not, with_deaths
from agent.controller.replication import (
    chosen,
    enough,
    has_all,
    has_writers,
    held_too_early,
    holders,
    is_stuck,
    newest_covered,
    parts_in,
    pools_of,
    seat_of,
    shared_out,
    sides_of_copy,
    states_in,
    voters_of,
    why_no_holder,
    why_not_covered,
    why_not_whole,
    writable,
)
from agent.controller.restart_policy import decide_restart
from agent.controller.states import Condition, JobState
from agent.ranks.rank_map import RankMap
from agent.ranks.rank_set import RankSet
from agent.ranks.said import Said, said_by, sides_of
from agent.text.wording import described, listed
from worker_hooks.contract import protocol

CHANGED = "said two different things about one step"
NOTHING = "no step was committed yet, there is nothing to save"
UNSAVED = "saving after a failure is off"


class Turn(NamedTuple):
    """The job after an event of the dump, the answer for the table of moves, and what to do."""

    job: Job
    condition: Condition
    actions: tuple[do.Action, ...] = ()


DumpEvent = (
    protocol.Standing
    | protocol.Frozen
    | protocol.Written
    | protocol.Digested
    | protocol.SaveFailed
    | protocol.Progress
    | ev.DumpProgressed
    | ev.DumpCommitted
    | ev.CommitFailed
)


# --- freezing -------------------------------------------------------------------------------------


def new_dump(job: Job, freeze_s: float = 0.0) -> DumpProgress:
    """A dump by all ranks that can be asked, which have ``freeze_s`` to answer."""
    return DumpProgress(1 if job.dump is None else job.dump.id + 1, job.reachable(), freeze_s)


def freeze(job: Job, reason: str, freeze_s: float | None = None) -> Turn:
    """Begin: freeze all ranks that can be asked. There must be one."""
    within_s = job.policy.dump.answer_s if freeze_s is None else freeze_s
    dump = new_dump(job, within_s)
    actions = (
        do.FreezeRanks(tuple(dump.asked), dump.id, reason),
        do.SetDeadline(JobState.FREEZING, job.attempt, within_s),
    )
    return Turn(job._replace(dump=dump), Condition.STATE_HELD, actions)


def note_frozen(job: Job, event: protocol.Frozen) -> Job:
    """A rank is frozen. One that says so late may still stand in for another."""
    job, dump = job.with_step(event.rank, event.step), job.present_dump()
    answers, behind = dump.answers.set(event.rank, event), dump.behind - {event.rank}
    return job._replace(dump=dump._replace(answers=answers, behind=behind))


def choose(job: Job, *, is_late: bool = False) -> Turn:
    """While freezing: once all have answered, or it is too late, the newest whole step."""
    dump, reachable = job.present_dump(), job.reachable()
    owing = dump.behind if dump.reach != NEVER else dump.asked - dump.answers.ranks
    if not is_late and owing & reachable:
        return Turn(job, Condition.ANSWERS_AWAITED)
    answers = list(dump.answers.only(reachable).values())
    whole = [answer.step for answer in answers if answer.is_whole]
    if not whole:
        return give_up(job, dump, f"no rank holds it whole: {why_not_whole(job, dump)}")
    covered = newest_covered(job, dump)
    step = max(whole) if covered is None else covered
    is_first = dump.reach == NEVER and not is_late
    if is_first and (behind := held_too_early(job, answers, step)):
        return _let_on(job, dump._replace(reach=step, behind=RankSet(behind)))
    dump = dump._replace(step=step)
    if why := why_not_covered(job, dump):
        return give_up(job, dump, why)
    gone = ranks_to_replace(job)
    not_replaced = why_not(with_deaths(job, gone, step), gone, step)
    if not not_replaced:
        dump = dump._replace(place=do.MEMORY)
    elif job.is_saved(step):
        job = not_replacing(job, not_replaced if step > 0 else "")
        return close_dump(job, dump, job.kept() or NOTHING)
    elif not job.saves():
        return give_up(not_replacing(job, not_replaced), dump._replace(step=step), UNSAVED)
    why = f"step {step} is the newest that a rank holds whole"
    turn = order_all(not_replacing(job, not_replaced), dump._replace(step=step), why)
    turn = turn._replace(condition=Condition.WHOLE)
    return turn if not_replaced else _prepare(turn, gone)


def _let_on(job: Job, dump: DumpProgress) -> Turn:
    """Let the ranks that are behind go on to the step that others hold.

    Nothing waits for them longer than for a first answer, which stands if there is no second one:
    others save the step. Where none is covered, a rank that has moved refuses to save what it held.
    """
    within_s = dump.freeze_s if job.now.exit is None else dump.freeze_s / 2  # time to write is left
    behind = tuple(dump.asked & dump.behind)
    why = f"other ranks hold step {dump.reach}, so {listed(behind)} may reach it, too"
    actions = (
        do.FreezeRanks(behind, dump.id, why, dump.reach),
        do.SetDeadline(JobState.FREEZING, job.attempt, within_s),
    )
    return Turn(job._replace(dump=dump), Condition.ANSWERS_AWAITED, actions)


def _prepare(turn: Turn, gone: Iterable[int]) -> Turn:
    """Start replacements of the dead early: they need not wait until the memory is complete."""
    dead = tuple(rank for rank in gone if not turn.job.ranks[rank].is_alive)
    if not dead:
        return turn
    why = f"{listed(dead)} will be replaced once the state is in memory"
    devices, _ = turn.job.devices.renewed(dead)  # nothing is used up yet
    rehearses = turn.job.since_restart.rehearses
    prepare = do.PrepareRanks(turn.job.attempt + 1, dead, why, devices.visible, rehearses)
    return turn._replace(actions=(*turn.actions, prepare))


def note_lost_step(job: Job) -> Job:
    """No rank can be asked: say so before the ends of the ranks hide why."""
    why = f"no rank can be asked: {why_not_whole(job)}"
    outcome = describe_loss(job, job.newest_step(), why)
    return job._replace(now=job.now._replace(outcome=outcome))


# --- writing --------------------------------------------------------------------------------------


def note_answer(job: Job, event: protocol.Written | protocol.Digested) -> Turn:
    """While dumping: a rank wrote a part, or says what it holds."""
    dump, seat, digest = job.present_dump(), seat_of(job, event), event.digest
    if dump.digests.get(seat, digest) != digest:
        return drop_writers(job, dump, (event.rank,), CHANGED)
    dump = dump._replace(digests=dump.digests.set(seat, digest), digesting=dump.digesting - {seat})
    if isinstance(event, protocol.Digested):
        return advance(job, dump)
    dump = dump._replace(writing=dump.writing - {seat})
    alike = next(group for group in dump.groups if seat in group)
    if dump.writing.isdisjoint(alike) and all(dump.digests[each] == digest for each in alike):
        dump = dump._replace(written=(*dump.written, alike))
    return advance(job, dump)


def note_failure(job: Job, event: protocol.SaveFailed) -> Turn:
    """While dumping: a rank could not; another one can, or another place."""
    dump = job.present_dump()
    # do not leave a place that holds a complete state for one that may be full, too
    if event.is_place and seat_of(job, event) in dump.writing and not has_all(job, dump):
        return _leave_place(job, dump, event.why)
    return drop_writers(job, dump, (event.rank,), f"failed ({event.why})")


def note_loss(job: Job, rank: int, why: str) -> Turn:
    """While dumping: a rank is gone, or cannot be reached any more."""
    return drop_writers(job, job.present_dump(), (rank,), why)


def blame_stuck(job: Job) -> Turn:
    """While dumping: nothing moved for too long. Blame the writers, or else the digesters.

    When a second writer is stuck in a place, blame the place, too.
    """
    dump = job.present_dump()
    if not dump.writing and not dump.digesting:  # all is known but why the ranks differ
        return _compare(job, dump._replace(has_waited=True))
    if dump.writing:
        is_second = dump.is_slow and not has_all(job, dump)
        if is_second and dump.place == do.MEMORY:
            return leave_memory(job, dump, "nothing moves there")
        if is_second and dump.place + 1 < job.policy.dump.places:
            dump = _next_place(dump, "nothing moves there")
        else:
            dump = dump._replace(is_slow=True)
    still = RankSet(parts_in(job).ranks_of(dump.writing or dump.digesting))
    why = f"made no progress in {job.policy.dump.stall_s:g} s"
    return drop_writers(job, dump._replace(stuck=dump.stuck | still), still, why)


def drop_writers(job: Job, dump: DumpProgress, ranks: Iterable[int], why: str) -> Turn:
    """Remove ranks from the dump. If one of them was a writer, its write order has failed."""
    failed = dump.failed.with_all(dict.fromkeys(RankSet(ranks), why))
    out = RankSet(parts_in(job).of_ranks(ranks))
    dump = dump._replace(failed=failed, digesting=dump.digesting - out)
    return reassign(job, dump) if out & dump.writing else advance(job, dump)


def reassign(job: Job, dump: DumpProgress) -> Turn:
    """A write order has failed: its other writers write everything, or else other holders do."""
    pools, able, states = pools_of(job), writable(job, dump), states_in(job, dump)
    if len(pools) > 1:  # who has written is not asked again: that would replace its file
        able = tuple(rank for rank in able if not states.has_written((rank,)))
    writers: list[int] = []
    left_of = shared_out((rank for rank in dump.writers if rank in {*able}), pools)
    others_of = chosen(job, dump, shared_out(able, pools))
    for pool, left, others in zip(pools, left_of, others_of, strict=True):
        if states.has_written(pool) and dump.writing.isdisjoint(pool):
            continue
        # with several pools those of the others go on meanwhile
        again = left or (others if len(pools) > 1 else ())
        if not again and len(pools) > 1 and not states.has_written(pool):
            return _lose(job, dump)
        writers += again
    if not writers:
        return advance(job, dump._replace(writers=(), writing=RankSet()))
    return order(job, dump, tuple(writers), problems(dump))


def _lose(job: Job, dump: DumpProgress) -> Turn:
    """Nobody is left to write the part of a replica group here: what others write is no use."""
    if dump.place == do.MEMORY:
        return leave_memory(job, dump, problems(dump))
    if _may_detour(job, dump):
        return _detour(job, dump, problems(dump))
    return give_up(job, dump, f"{problems(dump)}; {why_no_holder(job) or job.apart}")


def advance(job: Job, dump: DumpProgress) -> Turn:
    """What a dump needs next: wait, other writers, compare, commit, or give up."""
    writers = () if dump.writing or dump.writers else _first_writers(job, dump)
    if dump.digesting and writers:
        return order(job, dump, writers, problems(dump))
    if dump.writing or dump.digesting:
        return Turn(job._replace(dump=dump), Condition.ANSWERS_AWAITED, (extend_deadline(job),))
    return _compare(job, dump)


def _compare(job: Job, dump: DumpProgress) -> Turn:
    """All digests are known: what those of a group agree on must be written, else all of it."""
    states = states_in(job, dump)
    found = [said_by(states, group) for group in voters_of(job)]
    is_trial = job.since_restart.trial is not None and job.alive() and not dump.has_waited
    if any(len(each.ranked) > 1 for each in found) and is_trial:
        # those that were replaced may be the majority, and be wrong: the ranks' fingerprints tell
        return Turn(job._replace(dump=dump), Condition.ANSWERS_AWAITED, (extend_deadline(job),))
    return _settle(job, dump, found)


def _settle(job: Job, dump: DumpProgress, found: Sequence[Said]) -> Turn:
    """What the ranks hold is known: have written what is not, or commit."""
    able = {rank: place for place, rank in enumerate(writable(job, dump))}
    writers, why = _next_writers(job, dump, found, able)
    if writers:
        return order(job, dump, writers, why)
    is_disputed = any(said.ranked and not said.is_settled for said in found)
    if dump.place == do.MEMORY and is_disputed:
        return leave_memory(job, dump, "the replicas differ without a majority")
    lost = [said for said in found if said.written.keys().isdisjoint(said.wanted)]
    if not lost:
        return _commit(job, dump, found)
    silent = [rank for rank in able if rank not in dump.digests]
    groups = tuple(said.ranks for said in found)
    parts = dict(zip(groups, shared_out(silent, groups), strict=True))
    unknown = [parts[said.ranks] for said in lost]
    if all(unknown):
        most = None if is_stuck(job, dump) else 1
        writers = tuple(rank for ranks in unknown for rank in ranks[:most])
        return order(job, dump, writers, problems(dump))
    if dump.place == do.MEMORY or len(found) > 1 or _may_detour(job, dump):
        return _lose(job, dump)
    before = "those that held the majority's state are gone; " if dump.written else ""
    return give_up(job, dump, f"{before}{problems(dump)}")


def _next_writers(
    job: Job, dump: DumpProgress, found: Sequence[Said], able: Mapping[int, int]
) -> tuple[tuple[int, ...], str]:
    """Those that write what is not written yet, one state in each pool; and why."""
    writers, why = list[int](), ""
    is_one_pool = len(pools_of(job)) == 1
    for said in found:
        if writers and is_one_pool:  # together they would write parts of one state
            break
        for digest in said.wanted:
            ranks = said.by_digest[digest]
            alike = tuple(sorted(able.keys() & ranks, key=able.__getitem__))
            if alike and digest not in said.written:
                writers += enough(job, dump, alike) if said.is_settled else alike[:1]
                said_so = listed(parts_in(job).ranks_of(ranks))
                why = why or f"what {said_so} said to hold is not written yet"
                break
    return tuple(writers), why


def order_all(job: Job, dump: DumpProgress, why: str) -> Turn:
    """The first order in a place: the quickest write, and the other holders send digests."""
    if _may_detour(job, dump) and not has_writers(job, dump):
        dump = _to_memory(dump)
    writers = _first_writers(job, dump)
    writing = {*writers}
    others = tuple(rank for rank in holders(job, dump) if rank not in writing)
    return order(job, dump, writers, why, others)


def _may_detour(job: Job, dump: DumpProgress) -> bool:
    """Whether the dump may go to memory first, because not every rank can write to its folder.

    What ranks of other nodes write there comes to this node, which writes it to its disk.
    """
    return bool(job.apart) and dump.place != do.MEMORY and not dump.why_no_memory


def _to_memory(dump: DumpProgress) -> DumpProgress:
    return dump._replace(
        place=do.MEMORY,
        digesting=RankSet(),
        digests=RankMap(),
        written=(),
        is_slow=False,
        since=dump.round + 1,
    )


def _detour(job: Job, dump: DumpProgress, why: str) -> Turn:
    """No rank that could write to the folder is left; others hold the state."""
    dump = _to_memory(dump._replace(full=(*dump.full, why)))
    if lost := why_not_covered(job, dump):
        return give_up(job, dump, f"{why}; {lost}")
    return order_all(job, dump, why)


def _first_writers(job: Job, dump: DumpProgress) -> tuple[int, ...]:
    """Those of each replica group whose state is not written yet; of all, if none is known."""
    pools = pools_of(job)
    of = list(zip(pools, shared_out(writable(job, dump), pools), strict=True))
    has_written = states_in(job, dump).has_written
    left = [able for pool, able in of if not has_written(pool)] or [able for _, able in of]
    return tuple(seat for each in chosen(job, dump, left) for seat in each)


def order(
    job: Job,
    dump: DumpProgress,
    writers: tuple[int, ...],
    reason: str,
    digesters: tuple[int, ...] = (),
) -> Turn:
    """Order ranks to write; an earlier order to write no longer counts."""
    groups = tuple(filter(None, shared_out(writers, pools_of(job))))
    dump = dump._replace(
        round=dump.round + 1,
        writers=writers,
        groups=groups,
        writing=RankSet(writers),
        digesting=dump.digesting | RankSet(digesters),
    )
    save = do.SaveRanks(
        dump.id,
        dump.step,
        writers,
        digesters,
        dump.place,
        reason,
        round=dump.round,
        is_raised=job.now.is_failure_raised,
        groups=groups if len(groups) > 1 else (),
        parts=parts_in(job).every * parts_in(job).are_shared,
        gone=ranks_to_replace(job) if dump.place == do.MEMORY else (),
    )
    begun = job._replace(dump=dump, remembers=job.remembers or dump.place == do.MEMORY)
    return Turn(begun, Condition.ANSWERS_AWAITED, (save, extend_deadline(job)))


def problems(dump: DumpProgress) -> str:
    """What went wrong so far."""
    failed = described(dump.failed.items())
    found = [part for part in (dump.why_no_memory, *dump.full, failed) if part]
    return "; ".join(found) or "no rank is left to write"


def extend_deadline(job: Job, state: JobState = JobState.DUMPING) -> do.SetDeadline:
    """Something moved: the dump is slow, not stuck."""
    return do.SetDeadline(state, job.attempt, job.policy.dump.stall_s)


# --- places ---------------------------------------------------------------------------------------


def _leave_place(job: Job, dump: DumpProgress, why: str) -> Turn:
    if dump.place == do.MEMORY:
        return leave_memory(job, dump, why)
    dump = _next_place(dump, why)
    if dump.place < job.policy.dump.places:
        return reassign(job, dump)
    return give_up(job, dump, problems(dump))


def _next_place(dump: DumpProgress, why: str) -> DumpProgress:
    return dump._replace(place=dump.place + 1, full=(*dump.full, why), written=(), is_slow=False)


def leave_memory(job: Job, dump: DumpProgress, why: str) -> Turn:
    """No checkpoint in memory, so no rank is replaced: save on disk, and ask all ranks again."""
    why = f"no checkpoint in memory ({why})"
    job = job._replace(now=job.now._replace(not_replaced=why))
    dump = dump._replace(
        place=0,
        failed=RankMap(),
        digesting=RankSet(),
        digests=RankMap(),
        written=(),
        is_slow=False,
        why_no_memory=why,
        since=dump.round + 1,
    )
    if job.is_saved(dump.step):
        return close_dump(job, dump, job.kept())
    if not job.saves():
        return give_up(job, dump, UNSAVED)
    if not holders(job, dump):
        return give_up(job, dump, f"{why}; no rank is left to write")
    if lost := why_not_covered(job, dump):
        return give_up(job, dump, f"{why}; {lost}")
    if job.apart and not has_writers(job, dump):
        return give_up(job, dump, f"{why}; the ranks of the first node do not hold it: {job.apart}")
    return order_all(job, dump, why)


# --- committing -----------------------------------------------------------------------------------


def _commit(job: Job, dump: DumpProgress, found: Sequence[Said]) -> Turn:
    """Everything is written that there are parts of."""
    ranks_of = parts_in(job).ranks_of
    found_by = {digest: said for said in found for digest in said.wanted if digest in said.written}
    kept = {digest: said.by_digest[digest] for digest, said in found_by.items()}
    variants = tuple(said.written[digest] for digest, said in found_by.items())
    lone = next(iter(kept)) if len(variants) == 1 else None
    differ = (
        seat
        for said in found
        for digest, seats in said.by_digest.items()
        for seat in seats
        if (digest != lone if lone else said.is_settled and digest not in kept)
    )
    odd = tuple(RankSet(ranks_of(differ)))
    remark = ""
    if odd and all(said.is_settled for said in found):
        remark = f"; {listed(odd)} held another state than the majority"
    disputed = [said for said in found if not said.is_settled]
    if disputed:
        sides = disputed[0].by_digest
        against = " against ".join(listed(ranks_of(sides[digest])) for digest in disputed[0].ranked)
        is_each = all(digest in kept for said in disputed for digest in said.ranked)
        only = " and ".join(listed(ranks_of(each)) for each in variants)
        each = "each state is kept" if is_each else f"only what {only} wrote is kept"
        remark = f"; the replicas differ without a majority ({against}): {each}"
    dump = dump._replace(
        is_ordered=True,
        remark=remark,
        variants=variants,
        sides=tuple(map(ranks_of, sides_of(kept, found))),
        odd=odd,
        is_disputed=bool(disputed),
    )
    writers = " and ".join(listed(ranks_of(each)) for each in variants)
    why = f"step {dump.step} is written by {writers}{remark}"
    commit = do.CommitDump(
        dump.id,
        dump.step,
        dump.place,
        variants,
        odd,
        why,
        dump.sides,
        is_disputed=bool(disputed),
    )
    actions = (commit, extend_deadline(job, JobState.COMMITTING))
    return Turn(job._replace(dump=dump), Condition.WRITTEN, actions)


def commit_memory(job: Job, dump: DumpProgress, place: int, why: str) -> Turn:
    """Have what is in memory written to disk, for which no rank needs to be alive."""
    dump = dump._replace(place=place, is_ordered=True, is_committed=False)
    is_copy = dump.is_copy or dump.is_kept
    sides = sides_of_copy(job, dump.variants) if is_copy else dump.sides
    follows = decide_restart(job).condition
    is_early = job.policy.dump.restarts_from_memory and follows is Condition.BUDGET_LEFT
    commit = do.CommitDump(
        dump.id,
        dump.step,
        place,
        dump.variants,
        dump.odd,
        why,
        sides if len(sides) > 1 else (),
        from_memory=True,
        is_copy=dump.is_copy,
        is_early=is_early,
        is_kept=dump.is_kept,
    )
    actions = (commit, extend_deadline(job, JobState.COMMITTING))
    return Turn(job._replace(dump=dump), Condition.IN_MEMORY, actions)


def note_commit(job: Job, event: ev.DumpCommitted) -> Job:
    """The dump is complete, even if it was given up before that is known."""
    dump = job.present_dump()._replace(is_committed=True)
    job = job._replace(dump=dump).with_saved(dump, event.path, is_early=event.is_early)
    if job.state in {JobState.COMMITTING, JobState.STOPPING, JobState.KILLING}:
        return job._replace(now=job.now._replace(outcome=f"{job.kept()}{dump.remark}"))
    return job  # the next attempt has begun


def note_commit_failure(job: Job, event: ev.CommitFailed) -> Turn:
    """While committing: everything again in the next place, or the end of it."""
    dump = job.present_dump()._replace(is_ordered=False)
    if event.is_state:
        job = not_replacing(job, f"step {dump.step} cannot be saved")
        return give_up(job, dump, event.why)
    if dump.place == do.MEMORY:
        return leave_memory(job, dump, event.why)
    # the checkpoint in memory may be that of a replacement which is not confirmed yet
    is_in_memory = job.memory is not None and dump.memory == job.memory.path
    if is_in_memory and event.is_place and dump.place + 1 < job.policy.dump.places:
        dump = _next_place(dump, event.why)
        return commit_memory(job, dump, dump.place, problems(dump))
    if is_in_memory:
        return give_up(job, dump, problems(dump._replace(full=(*dump.full, event.why))))
    if not event.is_place:
        return give_up(job, dump, f"its manifest failed ({event.why})")
    return _leave_place(job, dump, event.why)


def give_up_commit(job: Job) -> Turn:
    """While committing: nothing moved for too long."""
    why = f"its commit made no progress in {job.policy.dump.stall_s:g} s"
    return give_up(job, job.present_dump(), why)


def give_up(job: Job, dump: DumpProgress, why: str) -> Turn:
    """The newest step is lost, for the reason in ``why``."""
    if dump.is_copy:
        why = f"nor is the copy of step {dump.step} ({why})"
    return close_dump(job, dump, describe_loss(job, max(dump.step, job.newest_step()), why))


def describe_loss(job: Job, step: int, why: str) -> str:
    """That ``step`` is lost and why, and what remains."""
    kept = job.kept()
    lost = "no newer step is saved" if kept else "no step is saved"
    if not job.is_saved(step):
        lost = f"step {step} is not saved"
    no_copy = job.since_restart.copies.lost
    return "; ".join(part for part in (f"{lost}: {why}", no_copy, kept) if part)


def close_dump(job: Job, dump: DumpProgress, outcome: str) -> Turn:
    """The dump ends; ``outcome``: what became of the attempt's state."""
    job = job._replace(dump=dump, now=job.now._replace(outcome=outcome))
    return Turn(job, Condition.GIVEN_UP, (do.AbandonDump(dump.id, outcome),))
