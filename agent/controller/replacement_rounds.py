"""The rounds of a replacement: who has to go, who is started, who lives on; and the fall. Pure.

A round begins when everybody is gone who is not to live on: nobody who is lost, and no newcomer of
an earlier round that had not joined, can disturb it. Each counts against the budget, so they end.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable

from agent.controller import actions as do
from agent.controller.attempts import forgotten, signal_ranks
from agent.controller.dump_steps import UNSAVED, Turn, commit_memory, give_up
from agent.controller.job import Job, Replacement
from agent.controller.replaceable import counted, excused, why_not
from agent.controller.states import Condition, JobState, RankState
from agent.text.wording import listed, ranged


def fall_back_to_disk(job: Job, why: str) -> Turn:
    """The next rung: what is in memory goes to disk, unless it is there already."""
    assert job.memory is not None
    dump, step = job.dump, job.memory.step
    assert dump is not None
    first = job.failure if job.replacement is None else job.replacement.why
    job = excused(job, why)._replace(failure=first, is_failure_raised=False, replacement=None)
    if step <= max(job.saved_step, 0):
        return Turn(job._replace(outcome=job.kept()), Condition.GIVEN_UP)
    if not job.saves():
        return give_up(job, dump, UNSAVED)
    return commit_memory(job, dump, 0, f"nobody is replaced: {why}")


def launch(job: Job) -> Turn:
    """Everybody who had to go is gone."""
    now, memory = under_way(job), job.memory
    assert memory is not None
    newcomers = tuple(rank for rank, state in job.ranks.items() if not state.is_alive)
    survivors = job.alive()
    sentence = _sentence(job.failure or now.why, memory.step, newcomers, survivors)
    job = forgotten(job)._replace(
        attempt=job.attempt + 1,
        replaced=job.replaced + len(newcomers),
        replaced_in_all=job.replaced_in_all + len(newcomers),
        reached=job.newest_step(),
        ranks={**job.ranks, **dict.fromkeys(newcomers, RankState.PENDING)},
        replacement=now._replace(
            is_killing=False,
            sentence=sentence,
            newcomers=frozenset(newcomers),
            leaving=frozenset(survivors),
            joined=frozenset(),
            doubt="",
        ),
    )
    told = job.attempt, survivors, newcomers, memory.path, memory.step, sentence
    reminders = [do.RemindReplaced(job.rules.replacement_period_s) for _ in newcomers]
    return wait(job, (do.ReplaceRanks(*told), *reminders, deadline_s(job, job.rules.rejoin_s)))


def _sentence(failure: str, step: int, newcomers: Iterable[int], survivors: Iterable[int]) -> str:
    """``rank 3 was killed by SIGKILL at step 412: replaced, ranks 0-2 live on``."""
    new, old = ranged(newcomers), ranged(survivors)
    who = "" if failure.startswith(f"{new} ") else f"{new} "
    verb = "lives" if old.startswith("rank ") else "live"
    return f"{failure} at step {step}: {who}replaced, {old} {verb} on"


def lose_more(job: Job, ranks: Iterable[int], words: str) -> Turn:
    """More are lost, dead or not: another round, if there can be one."""
    now, memory = under_way(job), job.memory
    assert memory is not None
    new = frozenset(ranks) - now.going
    if not new:
        return wait(job)
    job = counted(job._replace(failure=job.failure or words), new, memory.step)
    idle = now.newcomers - now.joined  # may know the broken group, and cannot be told to leave it
    leaving = (new | idle) & {*job.alive()} - now.going
    going = now.going | leaving
    gone = going | {rank for rank, state in job.ranks.items() if not state.is_alive}
    if why := why_not(job, gone, memory.step):
        return fall_back_to_disk(job, why)
    job = job._replace(
        replacement=now._replace(
            lost=now.lost | new,
            going=going,
            is_killing=now.is_killing if now.going else True,
            leaving=now.leaving - going,
        )
    )
    if not going:
        return launch(job)
    if not leaving:
        return wait(job)
    killed = [rank for rank in sorted(leaving) if job.ranks[rank] is RankState.RUNNING]
    actions = signal_ranks(killed, signals.SIGKILL, f"{words}; {listed(killed)} cannot join then")
    if job.having(RankState.PENDING):
        actions += (do.CancelStarts(words),)
    return wait(job, (*actions, deadline_s(job, job.rules.kill_s)))


def note_gone(job: Job, rank: int) -> Turn:
    """One that had to go is gone, in whatever way."""
    now = under_way(job)
    job = job.with_rank(rank, RankState.FAILED)
    job = job._replace(replacement=now._replace(going=now.going - {rank}))
    return wait(job) if under_way(job).going else launch(job)


def wait(job: Job, actions: tuple[do.Action, ...] = ()) -> Turn:
    """The round goes on."""
    return Turn(job, Condition.ANSWERS_AWAITED, actions)


def deadline_s(job: Job, seconds: float) -> do.SetDeadline:
    """For what is awaited next."""
    return do.SetDeadline(JobState.REPLACING, job.attempt, seconds)


def under_way(job: Job) -> Replacement:
    """The replacement; there must be one."""
    assert job.replacement is not None
    return job.replacement
