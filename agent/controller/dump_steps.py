"""What a dump needs next: wait, have it written by others, compare, commit, or give up.

Pure functions of the job and its dump. A writer that fails is replaced by another holder and never
asked again, a folder that fails by the next place; both are finite, so a dump ends. The memory is
a place before all folders; what goes wrong there is no reason to save nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from agent.controller import actions as do
from agent.controller.job import DumpProgress, Job
from agent.controller.states import Condition, JobState
from agent.text.wording import described, listed

UNSAVED = "saving after a failure is off"
WRITER_BYTES = 64 << 20  # of a state for each one who writes to memory: 30 ms of a core's time


class Turn(NamedTuple):
    """The job after an event of the dump, the answer for the table of moves, and what to do."""

    job: Job
    condition: Condition
    actions: tuple[do.Action, ...] = ()


def drop_writers(job: Job, dump: DumpProgress, ranks: Iterable[int], why: str) -> Turn:
    """These ranks do no more of it; if one of them was to write, the order to write has failed."""
    out = frozenset(ranks)
    failed = {**dump.failed, **dict.fromkeys(sorted(out), why)}
    dump = dump._replace(failed=failed, digesting=dump.digesting - out)
    return reassign(job, dump) if out & dump.writing else advance(job, dump)


def reassign(job: Job, dump: DumpProgress) -> Turn:
    """An order to write has failed: those that are left of it write, or else others."""
    able = holders(job, dump)
    left = tuple(rank for rank in dump.writers if rank in able)
    if left:
        return order(job, dump, left, problems(dump))
    return advance(job, dump._replace(writers=(), writing=frozenset()))


def advance(job: Job, dump: DumpProgress) -> Turn:
    """Wait, have the state written by others, compare what was written, or commit."""
    if dump.writing or (dump.writers and dump.digesting):
        return Turn(job._replace(dump=dump), Condition.ANSWERS_AWAITED, (extend_deadline(job),))
    if dump.digesting:
        able = holders(job, dump)  # at least those that are digesting
        return order(job, dump, _enough(job, dump, able), problems(dump))
    return _compare(job, dump)


def _compare(job: Job, dump: DumpProgress) -> Turn:
    """No more digests are awaited: what they agree on must be written, else all that differs."""
    groups: dict[str, list[int]] = {}
    for rank, digest in sorted(dump.digests.items()):
        groups.setdefault(digest, []).append(rank)
    ranked = sorted(groups, key=lambda digest: (-len(groups[digest]), groups[digest][0]))
    is_settled = bool(ranked) and 2 * len(groups[ranked[0]]) > len(dump.digests)
    wanted = ranked[:1] if is_settled else ranked
    able = holders(job, dump)
    for digest in wanted:
        alike = tuple(rank for rank in able if dump.digests.get(rank) == digest)
        if alike and digest not in dump.written:
            writers = _enough(job, dump, alike) if is_settled else alike[:1]
            why = f"what {listed(groups[digest])} said to hold is not written yet"
            return order(job, dump, writers, why)
    if dump.place == do.MEMORY and dump.digests and not is_settled:
        return leave_memory(job, dump, "the replicas differ without a majority")
    complete = [digest for digest in wanted if digest in dump.written]
    if complete:
        return _commit(job, dump, complete, [groups[digest] for digest in ranked], is_settled)
    unknown = tuple(rank for rank in able if rank not in dump.digests)
    if unknown:
        writers = unknown if _is_stuck(job, dump) else unknown[:1]
        return order(job, dump, writers, problems(dump))
    if dump.place == do.MEMORY:
        return leave_memory(job, dump, problems(dump))
    lost = "those that held the majority's state are gone; " if dump.written else ""
    return give_up(job, dump, f"{lost}{problems(dump)}")


def leave_memory(job: Job, dump: DumpProgress, why: str) -> Turn:
    """No checkpoint in memory, so nobody is replaced: save on disk, as if nobody was asked yet."""
    why = f"no checkpoint in memory ({why})"
    job = job._replace(not_replaced=why)
    dump = dump._replace(
        place=0,
        full=(*dump.full, why),
        failed={},
        digesting=frozenset(),
        digests={},
        written={},
        is_slow=False,
        since=dump.round + 1,
    )
    if dump.step <= max(job.saved_step, 0):
        return close_dump(job, dump, job.kept())
    if not job.saves():
        return give_up(job, dump, UNSAVED)
    if not holders(job, dump):
        return give_up(job, dump, f"{why}; nobody is left to write")
    return order_all(job, dump, why)


def commit_memory(job: Job, dump: DumpProgress, place: int, why: str) -> Turn:
    """Have what is in memory written to disk, which nobody needs to be alive for."""
    dump = dump._replace(place=place, is_ordered=True, is_committed=False)
    commit = do.CommitDump(
        dump.id, dump.step, place, dump.variants, dump.odd, why, from_memory=True
    )
    actions = (commit, extend_deadline(job, JobState.COMMITTING))
    return Turn(job._replace(dump=dump), Condition.IN_MEMORY, actions)


def _enough(job: Job, dump: DumpProgress, able: tuple[int, ...]) -> tuple[int, ...]:
    """Of those that are able, who writes."""
    if job.rules.split or _is_stuck(job, dump):
        return able
    if dump.place != do.MEMORY:
        return able[:1]
    nbytes = max((answer.nbytes for answer in dump.answers.values()), default=0)
    return able[: min(job.rules.memory_writers, 1 + nbytes // WRITER_BYTES)]


def _is_stuck(job: Job, dump: DumpProgress) -> bool:
    """Whether a writer was stuck in the last place: hundreds must not be so one after the other."""
    return dump.is_slow and not dump.written and dump.place + 1 == job.rules.places


def _commit(
    job: Job,
    dump: DumpProgress,
    complete: Sequence[str],
    groups: Sequence[list[int]],
    is_settled: bool,
) -> Turn:
    variants = tuple(dump.written[digest] for digest in complete)
    odd: tuple[int, ...] = ()
    if len(variants) == 1:
        mine = complete[0]
        odd = tuple(sorted(rank for rank, digest in dump.digests.items() if digest != mine))
    remark = ""
    if is_settled and odd:
        remark = f"; {listed(odd)} held another state than the majority"
    elif odd or len(variants) > 1:
        sides = " against ".join(listed(group) for group in groups)
        kept = "each state is kept"
        if len(variants) < len(groups):
            kept = f"only what {' and '.join(map(listed, variants))} wrote is kept"
        remark = f"; the replicas differ without a majority ({sides}): {kept}"
    dump = dump._replace(is_ordered=True, remark=remark, variants=variants, odd=odd)
    why = (
        f"step {dump.step} is written by {' and '.join(listed(each) for each in variants)}{remark}"
    )
    commit = do.CommitDump(dump.id, dump.step, dump.place, variants, odd, why)
    return Turn(
        job._replace(dump=dump),
        Condition.WRITTEN,
        (commit, extend_deadline(job, JobState.COMMITTING)),
    )


def order_all(job: Job, dump: DumpProgress, why: str) -> Turn:
    """The first order in a place: the quickest writes, or more do; what others hold is compared."""
    able = holders(job, dump)
    writers = _enough(job, dump, able)
    return order(job, dump, writers, why, able[len(writers) :])


def order(
    job: Job,
    dump: DumpProgress,
    writers: tuple[int, ...],
    reason: str,
    digesters: tuple[int, ...] = (),
) -> Turn:
    """Let them write; what was ordered to be written before counts no more."""
    dump = dump._replace(
        round=dump.round + 1,
        writers=writers,
        writing=frozenset(writers),
        digesting=dump.digesting | frozenset(digesters),
    )
    save = do.SaveRanks(
        dump.id,
        dump.step,
        writers,
        digesters,
        dump.place,
        reason,
        round=dump.round,
        is_raised=job.is_failure_raised,
    )
    begun = job._replace(dump=dump, remembers=job.remembers or dump.place == do.MEMORY)
    return Turn(begun, Condition.ANSWERS_AWAITED, (save, extend_deadline(job)))


def extend_deadline(job: Job, state: JobState = JobState.DUMPING) -> do.SetDeadline:
    """Something moved: the dump is slow, not stuck."""
    return do.SetDeadline(state, job.attempt, job.rules.dump_s)


def give_up(job: Job, dump: DumpProgress, why: str) -> Turn:
    """The newest step is lost, for the reason in ``why``."""
    return close_dump(job, dump, describe_loss(job, max(dump.step, job.newest_step()), why))


def describe_loss(job: Job, step: int, why: str) -> str:
    """That ``step`` is lost and why, and what remains."""
    kept = job.kept()
    lost = "no newer step is saved" if kept else "no step is saved"
    if step > max(job.saved_step, 0):
        lost = f"step {step} is not saved"
    return "; ".join(words for words in (f"{lost}: {why}", kept) if words)


def close_dump(job: Job, dump: DumpProgress, outcome: str) -> Turn:
    """No more of this dump; ``outcome``: what became of the attempt's state, in words."""
    job = job._replace(dump=dump, outcome=outcome)
    return Turn(job, Condition.GIVEN_UP, (do.AbandonDump(dump.id, outcome),))


def holders(job: Job, dump: DumpProgress) -> tuple[int, ...]:
    """Ranks that can write the dump's step, the quickest first, the busy ones last."""
    reachable = job.reachable()
    able = [
        rank
        for rank, answer in dump.answers.items()
        if answer.is_whole
        and answer.step == dump.step
        and rank in reachable
        and rank not in dump.failed
    ]
    return tuple(sorted(able, key=dump.digesting.__contains__))


def problems(dump: DumpProgress) -> str:
    """What went wrong so far."""
    failed = described(dump.failed.items())
    return "; ".join(words for words in (*dump.full, failed) if words) or "nobody is left to write"
