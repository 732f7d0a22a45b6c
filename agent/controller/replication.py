"""Who holds the same state, which part of a dump that covers, and if a replacement left all alike.

Pure.

Theory:

* ranks report what they hold at their first commits: those that hold the same are a replica
  group, and any rank can save for another one of its group; a group of one dies with its rank;
* before all have reported the same step, nothing is known, so nothing is promised;
* a replacement is a trial: its checkpoint stays in memory until all have reported two commits more;
* if they are equal then, it is confirmed; else all ranks are restarted from that checkpoint, as
  the script keeps something where no replacement can restore it;
* such a script is not replaced in again;
* values of the script's own may differ: those that a rank changes between backward and commit are
  said, since nobody knows them if it dies there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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
from agent.ranks.rank_map import RankMap
from agent.ranks.rank_set import RankSet
from agent.spec.job_spec import CopyMode
from agent.text.wording import described, listed, ranged
from worker_hooks.contract import protocol
from worker_hooks.contract.fingerprint import (
    LATE,
    Difference,
    Fingerprint,
    alike,
    describe,
    differences,
    is_own_value,
)

Groups = tuple[tuple[int, ...], ...]

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
    if trial is not None and is_trial and (wrong := _unlike(reports[step], known.groups)):
        # the others may be dead before they report
        return _failed(_with(job, known), trial, describe(wrong, trial.lost))
    if not are_all:
        return _with(job, known)
    every = differences(reports[step])
    found = [each for each in every if not is_own_value(each.name)]
    if found:
        groups = _divided(known.groups or (tuple(job.ranks),), alike(reports[step]))
        known = known._replace(groups=groups, difference=known.difference or describe(found))
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


def _may_differ(
    reports: RankMap[Fingerprint], groups: Groups, event: protocol.Fingerprinted
) -> bool:
    """Whether the newest report is not that of a replica, as far as one other report tells."""
    if len(groups) > 1:
        return True
    other = next(iter(reports))
    return other != event.rank and reports[other] != event.texts


def _unlike(reports: Mapping[int, Fingerprint], groups: Groups) -> list[Difference]:
    """What ranks of one replica group do not hold the same."""
    of = groups or (tuple(reports),)
    found = [
        each
        for group in of
        for each in differences({rank: reports[rank] for rank in group if rank in reports})
    ]
    return [each for each in found if not is_own_value(each.name)]


def note_vote(job: Job, event: protocol.VoteOpened) -> Job:
    """A rank votes on each update from now on, or said why it does not."""
    known, since = job.since_restart.comparison, job.since_restart
    voting = known.voting.noted(event.rank, event.why_not)
    if event.why_cut_inside:
        rejoining = since.rejoining.noted(event.rank, event.why_cut_inside)
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


def is_newer_copy(job: Job, event: ev.StateCopied) -> bool:
    """Whether it is news: of a copy, or that there will be none."""
    newest = job.since_restart.copies.newest
    return bool(event.why_not) or newest is None or event.step > newest.step


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
    parts = sides_of_copy(job, copy.variants)
    return None if is_doubtful or {*parts} != {*pools_of(job)} else copy


def kept_state(job: Job) -> MemoryState | None:
    """The newest state that the memory of killed ranks holds, if no checkpoint is as new.

    As long as one rank lives it may save it, or train on; so then there is none.
    """
    kept, known = job.now.kept, job.since_restart.comparison
    if not kept or job.alive() or job.apart or not job.saves():
        return None
    if known.unprotected or _why_not_compared(known):
        return None
    parts = shared_out(sorted(kept), replica_groups(job))
    held = [{step for rank in part for step in kept[rank]} for part in parts]
    step = max(set.intersection(*held), default=NEVER)
    if job.is_saved(step):
        return None
    writers = [next(rank for rank in part if step in kept[rank]) for part in parts]
    return MemoryState("", step, tuple((rank,) for rank in writers))


def is_all_kept(job: Job) -> bool:
    """Whether the memory of every rank outlives it."""
    return len(job.since_restart.keeping) == len(job.ranks) and not job.apart


def is_kept_next(job: Job) -> bool:
    """Whether what ranks that live hold is to be read in their memory, once they are killed.

    A dead rank has left what they cannot save without it. Where no place takes a dump, killing them
    would help nobody.
    """
    dump, alive, kept = job.dump, job.alive(), job.now.kept
    if not kept or dump is None or dump.full or job.state is JobState.COMMITTING:
        return False
    is_known = bool(alive) and not alive - job.since_restart.keeping
    is_known &= not job.having(RankState.PENDING)
    return is_known and job.saves() and not job.apart and job.has_news()


def sides_of_copy(job: Job, variants: Groups) -> Groups:
    """Of each part that these wrote, the ranks that hold it."""
    pools = pools_of(job)
    return tuple(pool for each in variants for pool in pools if {*each} <= {*pool})


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


def begin_trial(job: Job, lost: RankSet, step: int) -> Job:
    """The job once ranks are replaced, and all resume from ``step``."""
    known = job.since_restart.comparison
    trial = UnconfirmedReplacement(step, lost) if known.awaited else None
    known = known._replace(reports={}, late=frozenset())
    return job._replace(since_restart=job.since_restart._replace(comparison=known, trial=trial))


def has_just_failed(before: Job, job: Job) -> bool:
    """Whether it has turned out that ranks differ after a replacement, which is to be undone."""
    return bool(job.diverged) and not before.diverged


def _divided(groups: Groups, others: Groups) -> Groups:
    """The ranks that are together in both."""
    both = ({*group} & {*other} for group in groups for other in others)
    return tuple(sorted(tuple(sorted(each)) for each in both if each))


def replica_groups(job: Job) -> Groups:
    """The ranks that can save for each other; as long as that is not known, each for itself."""
    known = job.since_restart.comparison
    if known.unprotected or _why_not_compared(known):
        return tuple((rank,) for rank in job.ranks)
    return known.groups or (tuple(job.ranks),)


def known_groups(job: Job) -> Groups:
    """The replica groups, as the ranks have shown them; none: not all have."""
    known = job.since_restart.comparison
    if known.compared == NEVER or known.unprotected or known.late:
        return ()
    return known.groups or (job.policy.ranks,)


def lone_ranks(job: Job) -> tuple[int, ...]:
    """The ranks whose state no other one holds."""
    groups = job.since_restart.comparison.groups
    return tuple(group[0] for group in groups if len(group) == 1)


def why_no_holder(job: Job) -> str:
    """Why not any rank can save the state of any other one; empty: it can."""
    known = job.since_restart.comparison
    if known.unprotected:
        return known.unprotected
    if alone := lone_ranks(job):
        return f"{known.difference} (no other rank holds what rank {alone[-1]} has)"
    if known.groups and not known.late:
        return (
            f"the state is cut into {len(known.groups)} parts, each held by a replica group "
            f"({'; '.join(map(listed, known.groups))})"
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
# one order to write, as a pool: most likely they are alike.


def holders(job: Job, dump: DumpProgress) -> tuple[int, ...]:
    """Ranks that can write the dump's step, the quickest first, the busy ones last."""
    reachable = job.reachable()
    able = reachable - dump.failed.ranks
    found = [
        rank
        for rank, answer in dump.answers.items()
        if answer.is_whole and answer.step == dump.step and rank in able
    ]
    return tuple(sorted(found, key=dump.digesting.__contains__))


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
    """For each of these groups those of its ranks that are among some, in their order."""
    group_of = {rank: index for index, group in enumerate(groups) for rank in group}
    found: list[list[int]] = [[] for _ in groups]
    for rank in ranks:
        found[group_of[rank]].append(rank)
    return list(map(tuple, found))


def newest_covered(job: Job, dump: DumpProgress) -> int | None:
    """The newest step that a rank of each replica group holds whole; ``None``: there is none."""
    reachable = job.reachable() - dump.failed.ranks
    steps = {
        rank: answer.step
        for rank, answer in dump.answers.items()
        if answer.is_whole and rank in reachable
    }
    held = ({steps[rank] for rank in each} for each in shared_out(steps, replica_groups(job)))
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
    able, groups = holders(job, dump), replica_groups(job)
    of = zip(groups, shared_out(able, groups), strict=True)
    lost = [group for group, left in of if not left]
    if not lost or not (why := why_no_holder(job)):
        return ""
    reachable = job.reachable()
    steps = {
        rank: f"held step {answer.step}"
        for rank, answer in sorted(dump.answers.items())
        if answer.is_whole and rank in reachable
    }
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


def pools_of(job: Job) -> Groups:
    """The ranks that share the writing: a replica group, or all while none is known."""
    return job.since_restart.comparison.groups or (tuple(job.ranks),)


def has_written(dump: DumpProgress, pool: Iterable[int]) -> bool:
    """Whether what a rank of these holds is complete."""
    return any(dump.digests.get(rank) in dump.written for rank in pool)


def has_all(job: Job, dump: DumpProgress) -> bool:
    """Whether a whole state is complete, be it that of a minority."""
    return all(has_written(dump, pool) for pool in pools_of(job))


def enough(job: Job, dump: DumpProgress, able: tuple[int, ...]) -> tuple[int, ...]:
    """Of those that are able, the ones that write."""
    if dump.place == do.MEMORY or not job.policy.dump.split:
        able = _near(job, able) or able
    if job.policy.dump.split or is_stuck(job, dump):
        return able
    if dump.place != do.MEMORY:
        return able[:1]
    nbytes = max((answer.nbytes for answer in dump.answers.values()), default=0)
    return able[: min(job.policy.dump.memory_writers, 1 + nbytes // WRITER_BYTES)]


def _near(job: Job, able: tuple[int, ...]) -> tuple[int, ...]:
    """Of these ranks those of the controller's node: nothing they write has to travel."""
    there = job.policy.replace.near
    return tuple(rank for rank in able if rank in there)


def is_stuck(job: Job, dump: DumpProgress) -> bool:
    """Whether a writer was stuck in the last place: then all try, not hundreds one by one."""
    return dump.is_slow and not has_all(job, dump) and dump.place + 1 == job.policy.dump.places


class Said(NamedTuple):
    """What the ranks of a replica group said to hold."""

    ranks: tuple[int, ...]  # of the group
    by_digest: Mapping[str, tuple[int, ...]]
    ranked: tuple[str, ...]  # the digests, that of the most ranks first
    is_settled: bool  # that one is right: it is of the majority

    @property
    def wanted(self) -> tuple[str, ...]:
        """What is to be written."""
        return self.ranked[:1] if self.is_settled else self.ranked


def said_by(dump: DumpProgress, group: tuple[int, ...]) -> Said:
    """What these ranks have said of the dump's step so far."""
    found: dict[str, list[int]] = {}
    for rank in group:
        if (digest := dump.digests.get(rank)) is not None:
            found.setdefault(digest, []).append(rank)
    by_digest = {digest: tuple(ranks) for digest, ranks in found.items()}
    ranked = sorted(by_digest, key=lambda each: (-len(by_digest[each]), by_digest[each][0]))
    count = sum(map(len, by_digest.values()))
    is_settled = bool(ranked) and 2 * len(by_digest[ranked[0]]) > count
    return Said(group, by_digest, tuple(ranked), is_settled)


def sides_of(kept: Mapping[str, tuple[int, ...]], found: Sequence[Said]) -> Groups:
    """By variant the ranks whose state it is; none: there is but one, of all ranks."""
    if len(found) == 1 and found[0].is_settled:
        return ()
    sides = []
    for digest, ranks in kept.items():
        of = [said.ranks for said in found if said.is_settled and said.ranked[0] == digest]
        sides.append(tuple(sorted(rank for group in of for rank in group)) or ranks)
    return tuple(sides) if len(sides) > 1 or any(not said.is_settled for said in found) else ()
