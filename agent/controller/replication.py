"""Who holds the same state, which part of a dump that covers, and if a replacement left all alike.

Pure.

Theory:

* ranks report what they hold at their first commits: those that hold the same are a replica
  group, and any rank can save for another one of its group;
* they may hold one tensor alike with these ranks and another one with those: then the state has
  parts, each with ranks of its own, and any of them can save it (:mod:`agent.ranks.parts`); a part
  that one rank has alone dies with it;
* before all have reported the same step, nothing is known, so nothing is promised;
* a replacement is a trial: its checkpoint stays in memory until all have reported two commits more;
* if they are equal then, it is confirmed; else all ranks are restarted from that checkpoint, as
  the script keeps something where no replacement can restore it;
* such a script is not replaced in again;
* values of the script's own may differ: those that a rank changes between backward and commit are
  said, since nobody knows them if it dies there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from operator import attrgetter

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.job import (
    NEVER,
    Comparison,
    Copies,
    DumpProgress,
    Job,
    MemoryState,
    UnconfirmedReplacement,
)
from agent.controller.states import JobState, RankState
from agent.ranks.parts import Groups, Parts, parts_of
from agent.ranks.rank_map import RankMap
from agent.ranks.rank_set import RankSet
from agent.ranks.rows import due_in
from agent.ranks.said import States, states_of
from agent.spec.job_spec import CopyMode
from agent.text.wording import described, listed, ranged
from worker_hooks.contract import protocol
from worker_hooks.contract.fingerprint import (
    LATE,
    Difference,
    Fingerprint,
    describe,
    differences,
    differences_within,
    is_own_value,
)

_NO_REPORT: RankMap[Fingerprint] = RankMap()

WRITER_BYTES = 64 << 20  # of a state for each rank that writes to memory: 30 ms of a core's time
TRIAL_COMMITS = 2  # of all ranks, after which a replacement is confirmed


def note(job: Job, event: protocol.Fingerprinted) -> Job:
    """A rank said what it holds, which is compared with what others hold at this step."""
    known, step = job.since_restart.comparison, event.step
    if event.problem and event.rank not in job.now.registered:
        return _with(job, known._replace(uncounted=event.problem))
    if event.problem:
        return _with(job, known._replace(unprotected=known.unprotected or event.problem))
    late = known.late | {step} if event.is_late else known.late
    reports = {
        **known.reports,
        step: known.reports.get(step, _NO_REPORT).set(event.rank, event.texts),
    }
    known = known._replace(reports=reports, late=late)
    are_all, trial = len(reports[step]) == len(job.ranks), job.since_restart.trial
    is_trial = trial is not None and _may_differ(reports[step], known.groups, event)
    if trial is not None and is_trial and (wrong := _unlike(known, reports[step])):
        # the others may be dead before they report
        return _failed(_with(job, known), trial, describe(wrong, trial.lost))
    if not are_all:
        return _with(job, known)
    every = differences(reports[step])
    found = [each for each in every if not is_own_value(each.name)]
    if event.is_again:  # a majority is right, unless ranks have differed from the first step on
        apart = {each.name for each in _unlike(known, reports[step]) if not each.has_majority}
        found = [each for each in found if each.name in apart]
    if found:
        known = _with_cuts(job, known, found)
        known = known._replace(difference=known.difference or describe(found))
    own_values = {each.name for each in every if is_own_value(each.name)}
    known = known._replace(
        reports={other: each for other, each in reports.items() if other > step},
        late=frozenset(other for other in late if other > step),
        compared=max(step, known.compared),
        holds=known.holds if event.is_late else event.holds,
    )
    job = _with(job, known)._replace(differing=job.differing | own_values)
    if trial is not None and step >= trial.step + TRIAL_COMMITS:
        return job._replace(since_restart=job.since_restart._replace(trial=None))
    return job


def absorb(job: Job, news: Iterable[protocol.Fingerprinted]) -> tuple[Job, int]:
    """Take what ranks hold while others are awaited; in a trial only if it is alike; how many."""
    count, since = 0, job.since_restart
    if job.state.is_end or (since.trial is not None and len(since.comparison.groups) > 1):
        return job, 0
    for step, row in groupby(news, attrgetter("step")):
        of_step = list(row)
        job, more = _absorb_at(job, step, of_step)
        count += more
        if more < len(of_step):
            break
    return job, count


def _absorb_at(job: Job, step: int, row: Sequence[protocol.Fingerprinted]) -> tuple[Job, int]:
    known = job.since_restart.comparison
    before = known.reports.get(step, _NO_REPORT)
    first = next(iter(before.values()), row[0].texts)

    def fits(one: protocol.Fingerprinted) -> bool:
        is_alike = job.since_restart.trial is None or one.texts == first
        return one.attempt == job.attempt and is_alike and not one.problem

    missing = job.ranks.all - before.ranks
    taken = due_in(takewhile(fits, row), attrgetter("rank"), missing & job.alive(), missing)
    if not taken:
        return job, 0
    reports = before.with_all({rank: one.texts for rank, one in taken.items()})
    late = known.late | {step for one in taken.values() if one.is_late}
    known = known._replace(reports={**known.reports, step: reports}, late=late)
    return _with(job, known), len(taken)


def _may_differ(
    reports: RankMap[Fingerprint], groups: Groups, event: protocol.Fingerprinted
) -> bool:
    """Whether the newest report is not that of a replica, as far as one other report tells."""
    if len(groups) > 1:
        return True
    other = next(iter(reports))
    return other != event.rank and reports[other] != event.texts


def _unlike(known: Comparison, reports: Mapping[int, Fingerprint]) -> list[Difference]:
    """What ranks do not hold the same although they did."""
    others = tuple(part.ranks for part in known.parts.every) or (tuple(reports),)
    return differences_within(reports, lambda name: known.cuts.get(name, others))


def _with_cuts(job: Job, known: Comparison, found: list[Difference]) -> Comparison:
    """What is known once ranks turned out not to hold all of this the same."""
    whole = (tuple(job.ranks),)
    cuts = {each.name: _divided(known.cuts.get(each.name, whole), each.groups) for each in found}
    groups = known.groups or whole
    for blocks in dict.fromkeys(cuts.values()):
        groups = _divided(groups, blocks)
    cuts = {**known.cuts, **cuts}
    values = known.values | {each.name for each in found if each.is_value}
    found_now = known._replace(cuts=cuts, values=values, groups=groups)
    now = _parts(job, found_now)
    are_numbered = job.state in {JobState.DUMPING, JobState.COMMITTING}
    if are_numbered and (now.are_shared or known.parts.are_shared):
        return found_now  # what is being written is known by the seats of the parts before
    return found_now._replace(parts=now)


def _parts(job: Job, known: Comparison) -> Parts:
    return parts_of(len(job.ranks), known.groups, known.cuts, known.values)


def note_vote(job: Job, event: protocol.VoteOpened) -> Job:
    """A rank votes on each update from now on, or said why it does not."""
    known, since = job.since_restart.comparison, job.since_restart
    voting = known.voting.noted(RankSet((event.rank,)), event.why_not)
    if event.why_cut_inside:
        rejoining = since.rejoining.noted(RankSet((event.rank,)), event.why_cut_inside)
        job = job._replace(since_restart=since._replace(rejoining=rejoining))
    return _with(job, known._replace(voting=voting))


def note_copy(job: Job, event: ev.StateCopied) -> Job:
    """A copy of the state is complete in memory, or none can ever be."""
    since = job.since_restart
    if event.why_not:
        return _with_copies(job, since.copies._replace(why_not=event.why_not))
    newest = MemoryState("", event.step, event.variants)
    job = job._replace(since_restart=since._replace(reached=max(since.reached, event.step)))
    return _with_copies(job, since.copies._replace(newest=newest, every=event.every, lost=""))


def lose_copy(job: Job) -> Job:
    """The job once a node is gone: what its ranks had copied was in its memory alone."""
    copies = job.since_restart.copies
    if copies.newest is None:
        return job
    lost = f"the copy of step {copies.newest.step} in memory is lost with the node"
    return _with_copies(job, copies._replace(newest=None, lost=lost))


def _with_copies(job: Job, copies: Copies) -> Job:
    return job._replace(since_restart=job.since_restart._replace(copies=copies))


def unsaved_copy(job: Job) -> MemoryState | None:
    """The newest copy of the state in memory, if no checkpoint is as new, and if it may be saved.

    One that was taken before ranks turned out to differ lacks what some of them hold, and so may
    one that has what was added to the state and is not compared yet.
    """
    copy, known = job.since_restart.copies.newest, job.since_restart.comparison
    if copy is None or job.apart or job.is_saved(copy.step) or not job.saves():
        return None
    is_doubtful = known.unprotected or any(step <= copy.step for step in known.late)
    groups = known.groups or (tuple(job.ranks),)
    parts = sides_of_copy(job, copy.variants)
    return None if is_doubtful or {*parts} != {*groups} else copy


def kept_state(job: Job, before: int | None = None) -> MemoryState | None:
    """The newest state that the memory of killed ranks holds, if no checkpoint is as new.

    As long as one rank lives it may save it, or train on; so then there is none.
    ``before``: only of a step before this one, which could not be read.
    """
    kept = job.now.kept
    if not kept or job.alive() or _why_not_read(job):
        return None
    parts = shared_out(sorted(kept), replica_groups(job))
    held = [{step for rank in part for step in kept[rank]} for part in parts]
    steps = (step for step in set.intersection(*held) if before is None or step < before)
    step = max(steps, default=NEVER)
    if job.is_saved(step):
        return None
    writers = [next(rank for rank in part if step in kept[rank]) for part in parts]
    return MemoryState("", step, tuple((rank,) for rank in writers))


def _why_not_read(job: Job) -> str:
    """Why what killed ranks have left is not read; empty: it may be."""
    known = job.since_restart.comparison
    return known.unprotected or _why_not_compared(known) or job.apart or "off" * (not job.saves())


def is_all_kept(job: Job) -> bool:
    """Whether the memory of every rank outlives it, for good."""
    since = job.since_restart
    if (
        len(since.keeping) != len(job.ranks) or job.apart or since.not_kept
    ):  # quick: it is asked often
        return False
    return job.policy.dump.copies is CopyMode.LIVE or since.notes.are_known(RankSet(job.ranks))


def is_kept_next(job: Job) -> bool:
    """Whether what ranks that live hold is to be read in their memory, once they are killed.

    A dead rank has left what they cannot save without it, or one of them does not answer. Where no
    place takes a dump, or a part is gone, killing them would help nobody.
    """
    dump, alive, kept = job.dump, job.alive(), job.now.kept
    if dump is None or dump.full or job.state is JobState.COMMITTING or _why_not_read(job):
        return False
    silent = alive & (job.now.hung | dump.stuck | (job.reachable() - dump.answers.ranks))
    is_known = bool(alive) and not alive - job.since_restart.keeping
    is_known &= not job.having(RankState.PENDING)
    is_there = all(shared_out({*alive, *kept}, replica_groups(job)))
    has_news = bool(silent) or (bool(kept) and job.has_news())  # who is silent may be further
    return is_known and is_there and has_news


def sides_of_copy(job: Job, variants: Groups) -> Groups:
    """Of each part that these wrote, the ranks that hold it."""
    groups = job.since_restart.comparison.groups or (tuple(job.ranks),)
    return tuple(group for each in variants for group in groups if {*each} <= {*group})


def are_copies_wanted(job: Job) -> bool:
    """Whether the state is to be copied: always, or as a death may leave nobody who holds it.

    Each node would write what its ranks have copied to the folder that all nodes share.
    """
    mode = job.policy.dump.copies
    if not job.policy.dump.after_failure or mode is CopyMode.OFF or job.apart:
        return False
    known = job.since_restart.comparison
    is_lone = len(job.ranks) == 1 or bool(lone_ranks(job))
    # parts may be of two steps after a death, and none is complete then
    has_no_vote = bool(known.groups and known.voting.reasons)
    is_late = any(each.startswith(LATE) for each in job.differing)
    return mode in {CopyMode.COPY, CopyMode.LIVE} or is_lone or has_no_vote or is_late


def groups_to_copy(job: Job) -> Groups:
    """The replica groups of which each is to keep copies of its part in memory; none: no copies.

    None are taken before ranks have shown what they share, nor while a replacement is on trial: its
    state may be wrong; nor if they would not be saved after a failure.
    """
    known, since = job.since_restart.comparison, job.since_restart
    is_alone = len(job.ranks) == 1 and bool(job.now.registered) and not known.awaited
    is_known = known.compared != NEVER or is_alone
    is_wrong = bool(known.unprotected or known.uncounted or since.trial or since.copies.why_not)
    if not are_copies_wanted(job) or not is_known or is_wrong or _why_not_compared(known):
        return ()
    return replica_groups(job)


def _failed(job: Job, trial: UnconfirmedReplacement, what: str) -> Job:
    if trial.failed:
        return job
    why = (
        f"after the replacement of {ranged(trial.lost)} {what}: "
        "the script keeps something outside of TrainState"
    )
    since_restart = job.since_restart._replace(trial=trial._replace(failed=why))
    return job._replace(since_restart=since_restart, diverged=why)


def note_mutual_wait(job: Job) -> Job:
    """All ranks wait for each other: a replacement that is not confirmed has failed."""
    trial = job.since_restart.trial
    return job if trial is None else _failed(job, trial, "all ranks waited for each other")


def begin_trial(job: Job, lost: RankSet, step: int) -> Job:
    """The job once ranks are replaced, and all resume from ``step``."""
    known = job.since_restart.comparison
    trial = UnconfirmedReplacement(step, lost) if known.awaited else None
    known = known._replace(reports={}, late=frozenset(), parts=_parts(job, known))
    return job._replace(since_restart=job.since_restart._replace(comparison=known, trial=trial))


def has_just_failed(before: Job, job: Job) -> bool:
    """Whether it has turned out that ranks differ after a replacement, which is to be undone."""
    return bool(job.diverged) and not before.diverged


def _divided(groups: Groups, others: Groups) -> Groups:
    """The ranks that are together in both."""
    place = {rank: index for index, other in enumerate(others) for rank in other}
    both: dict[tuple[int, int], list[int]] = {}
    for index, group in enumerate(groups):
        for rank in group:
            both.setdefault((index, place[rank]), []).append(rank)
    return tuple(sorted(map(tuple, both.values())))


def replica_groups(job: Job) -> Groups:
    """The ranks that can save for each other; as long as that is not known, each for itself."""
    known = job.since_restart.comparison
    if _is_unknown(known):
        return tuple((rank,) for rank in job.ranks)
    return known.groups or (tuple(job.ranks),)


def holders_of_parts(job: Job) -> Groups:
    """The ranks that hold each part of the state: any of them can save it."""
    known = job.since_restart.comparison
    if _is_unknown(known):
        return replica_groups(job)
    return tuple(part.ranks for part in known.parts.every) or (tuple(job.ranks),)


def _is_unknown(known: Comparison) -> bool:
    return bool(known.unprotected or _why_not_compared(known))


def known_groups(job: Job) -> Groups:
    """The replica groups, as the ranks have shown them; none: not all have."""
    known = job.since_restart.comparison
    if known.compared == NEVER or known.unprotected or known.late:
        return ()
    return known.groups or (job.policy.ranks,)


def lone_ranks(job: Job) -> tuple[int, ...]:
    """The ranks of whose state no other one holds some part."""
    parts = job.since_restart.comparison.parts.every
    return tuple(part.ranks[0] for part in parts if len(part.ranks) == 1)


def why_no_holder(job: Job) -> str:
    """Why not any rank can save the state of any other one; empty: it can."""
    known = job.since_restart.comparison
    if known.unprotected:
        return known.unprotected
    if alone := lone_ranks(job):
        return f"{known.difference} (no other rank holds what rank {alone[-1]} has)"
    if known.groups and not known.late:
        parts = [part.ranks for part in known.parts.every]
        return (
            f"the state is cut into {len(parts)} parts, each held by a replica group "
            f"({'; '.join(map(listed, parts))})"
        )
    return _why_not_compared(known)


def why_not_held(job: Job) -> str:
    """Why what some rank holds dies with it; empty: each has a replica."""
    known = job.since_restart.comparison
    is_certain = not (known.unprotected or known.late)
    return "" if is_certain and known.groups and not lone_ranks(job) else why_no_holder(job)


def _why_not_compared(known: Comparison) -> str:
    if known.awaited and known.compared == NEVER:
        return "not all ranks had committed their first step, so nobody knows what they share"
    if known.late:
        return f"what was added to the state by step {min(known.late)} is not compared yet"
    return ""


def _with(job: Job, known: Comparison) -> Job:
    return job._replace(since_restart=job.since_restart._replace(comparison=known))


# --- what a dump covers ---------------------------------------------------------------------------
# As long as nobody knows who holds the same, each rank counts as a group of its own. But all share
# one order to write, as a pool: most likely they are alike. What is ordered is ordered of seats, of
# which a rank has one for each part that it holds.


def pools_of(job: Job) -> Groups:
    """The seats that share the writing: those of a part, or all ranks while none is known."""
    return parts_in(job).seats or (tuple(job.ranks),)


def voters_of(job: Job) -> Groups:
    """The seats that can save for each other; as long as that is not known, each for itself."""
    if _is_unknown(job.since_restart.comparison):
        return tuple((seat,) for pool in pools_of(job) for seat in pool)
    return pools_of(job)


def parts_in(job: Job) -> Parts:
    """The parts of the state, as far as they are known."""
    return job.since_restart.comparison.parts


def holders(job: Job, dump: DumpProgress) -> tuple[int, ...]:
    """Seats that can write the dump's step, the quickest ranks first, the busy ones last."""
    able = dump.answers.only(job.reachable() - dump.failed.ranks)
    found = (rank for rank, one in able.items() if one.is_whole and one.step == dump.step)
    return tuple(sorted(parts_in(job).of_ranks(found), key={*dump.digesting}.__contains__))


def writable(job: Job, dump: DumpProgress) -> tuple[int, ...]:
    """Those of :func:`holders` that can write to the dump's place.

    Without a common folder, ranks of other nodes would write to the disks of these.
    """
    able = holders(job, dump)
    return _near(job, able) if job.apart and dump.place != do.MEMORY else able


def has_writers(job: Job, dump: DumpProgress) -> bool:
    """Whether the whole state can be written to the dump's place."""
    return all(shared_out(writable(job, dump), pools_of(job)))


def shared_out(ranks: Iterable[int], groups: Groups) -> list[tuple[int, ...]]:
    """For each of these groups those of its ranks, or seats, that are among some, in order."""
    group_of = {rank: index for index, group in enumerate(groups) for rank in group}
    found: list[list[int]] = [[] for _ in groups]
    for rank in ranks:
        found[group_of[rank]].append(rank)
    return list(map(tuple, found))


def newest_covered(job: Job, dump: DumpProgress) -> int | None:
    """The newest step of which each part is held whole by some rank; ``None``: there is none."""
    able = dump.answers.only(job.reachable() - dump.failed.ranks)
    steps = {rank: answer.step for rank, answer in able.items() if answer.is_whole}
    parts = holders_of_parts(job)
    held = ({steps[rank] for rank in each if rank in steps} for each in parts)
    return max(set.intersection(*held), default=None)


def held_too_early(job: Job, answers: Iterable[protocol.Frozen], step: int) -> tuple[int, ...]:
    """The ranks that did not know that there is this step when they froze before it.

    A commit may come about while the order to freeze is under way. A rank that resumes with the
    weights of a step and the randomness and the buffers of the one before trains something else.
    """
    return tuple(
        answer.rank
        for answer in answers
        if answer.is_whole
        and max(answer.step, answer.limit) < step
        and answer.rank not in job.now.raised  # it cannot go on
    )


def why_not_covered(job: Job, dump: DumpProgress) -> str:
    """Why the ranks that hold the dump's step cannot save it for all; empty: they can."""
    able = RankSet(parts_in(job).ranks_of(holders(job, dump)))
    lost = [ranks for ranks in holders_of_parts(job) if able.isdisjoint(ranks)]
    if not lost or not (why := why_no_holder(job)):
        return ""
    answers = sorted(dump.answers.only(job.reachable()).items())
    steps = {rank: f"held step {answer.step}" for rank, answer in answers if answer.is_whole}
    if len(set(steps.values())) > 1:
        return f"{described(steps.items())}, and no step is held by every replica group; {why}"
    if len(lost[0]) > 1:
        facts = "".join(f" ({why_not_whole(job, dump, each)})" for each in lost[:1])
        parts = " or of ".join(map(listed, lost))
        return f"no rank is left that can save the part of {parts}{facts}; {why}"
    return why


def why_not_whole(
    job: Job, dump: DumpProgress | None = None, ranks: Iterable[int] | None = None
) -> str:
    """Every rank, or each of some, with the reason why it cannot save the state.

    Args:
        job: the job.
        dump: the answers it got.
        ranks: which; ``None``: all.
    """

    def fact(rank: int) -> str:
        answer = None if dump is None else dump.answers.get(rank)
        if job.ranks[rank] is not RankState.RUNNING:
            return "ended"
        if rank not in job.now.registered:
            return "registered no state"
        if rank in job.now.unreachable:
            return "let go of its state"
        if answer is None:
            within_s = job.policy.dump.answer_s if dump is None else dump.freeze_s
            return f"did not answer within {within_s:.3g} s"
        return f"cannot save it ({answer.why or 'torn'})"

    return described((rank, fact(rank)) for rank in (job.ranks if ranks is None else ranks))


def states_in(job: Job, dump: DumpProgress) -> States:
    """Which states the seats said to hold, and which of these are complete in the dump's place."""
    return states_of(dump.digests, dump.written, pools_of(job))


def has_all(job: Job, dump: DumpProgress) -> bool:
    """Whether a whole state is complete, be it that of a minority."""
    return all(map(states_in(job, dump).has_written, pools_of(job)))


def chosen(
    job: Job, dump: DumpProgress, pools: Iterable[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """Of the seats of each pool that are able, those that write; no rank much more than others."""
    parts, busy = parts_in(job), Counter[int]()
    for able in pools:
        if parts.are_shared:
            able = tuple(sorted(able, key=lambda seat: busy[parts.rank_of(seat)]))  # noqa: PLW2901
        found = enough(job, dump, able)
        busy.update(map(parts.rank_of, found))
        yield found


def enough(job: Job, dump: DumpProgress, able: tuple[int, ...]) -> tuple[int, ...]:
    """Of the seats of a pool that are able, the ones that write."""
    near = _near(job, able)
    if dump.place == do.MEMORY or not job.policy.dump.split:
        able = near or able
    if job.policy.dump.split or is_stuck(job, dump):
        return able
    if dump.place != do.MEMORY or (job.policy.replace.has_nodes and not near):
        return able[:1]  # what stays on another node is to be whole there
    nbytes = max((answer.nbytes for answer in dump.answers.values()), default=0)
    return able[: min(job.policy.dump.memory_writers, 1 + nbytes // WRITER_BYTES)]


def _near(job: Job, able: tuple[int, ...]) -> tuple[int, ...]:
    """Of these seats those of the controller's node: nothing they write has to travel."""
    there, rank_of = job.policy.replace.near, parts_in(job).rank_of
    return tuple(seat for seat in able if rank_of(seat) in there)


def is_stuck(job: Job, dump: DumpProgress) -> bool:
    """Whether a writer was stuck in the last place: then all try, not hundreds one by one."""
    return dump.is_slow and not has_all(job, dump) and dump.place + 1 == job.policy.dump.places


def seat_of(job: Job, event: protocol.Written | protocol.Digested | protocol.SaveFailed) -> int:
    """Which seat says so."""
    return parts_in(job).seat(event.rank, event.share)
