"""Who is lost after a failure, and whether others can be started in their place. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from agent.controller.job import NEVER, Job
from agent.controller.states import RankState
from agent.text.wording import described, listed, times


def ranks_to_replace(job: Job) -> tuple[int, ...]:
    """Ranks in whose place others are to be started, once the survivors stand still.

    Those that are dead, hung, or did not even answer; else the one that raised before all others.
    Whoever raised after a death lives on: the exception is its consequence.
    """
    answers = () if job.dump is None else job.dump.answers
    found = tuple(
        rank
        for rank, state in job.ranks.items()
        if state not in {RankState.RUNNING, RankState.SUCCEEDED}
        or rank in job.hung
        or (rank in job.guarded and rank not in job.unreachable and rank not in answers)
    )
    if found or job.first_raised is None:
        return found
    return (job.first_raised,)


def counted(job: Job, ranks: Iterable[int], step: int) -> Job:
    """The job once ``ranks`` were lost at ``step``."""
    before = {rank: job.deaths.get(rank, (NEVER, 0)) for rank in ranks}
    more = {rank: (step, count + 1 if at == step else 1) for rank, (at, count) in before.items()}
    return job._replace(deaths={**job.deaths, **more})


def excused(job: Job, why: str) -> Job:
    """The job that remembers why nobody is replaced, unless all stop for another reason."""
    return job if job.asked else job._replace(not_replaced=why)


def why_not(job: Job, gone: Collection[int], step: int) -> str:
    """Why no others can be started in the place of ``gone``; empty: they can.

    Args:
        job: with every loss counted.
        gone: all that would be started anew.
        step: what all would go on from.
    """
    return _why_never(job) or _why_not_now(job, gone) or _why_not_again(job, gone, step)


def _why_never(job: Job) -> str:
    if job.rules.can_replace_why:
        return job.rules.can_replace_why
    if not job.rules.replace:
        return "replacing is off"
    mute = [rank for rank in job.ranks if rank not in job.why_fixed]
    if mute:
        return f"{listed(mute)} registered no state"
    fixed: dict[str, list[int]] = {}
    for rank, why in sorted(job.why_fixed.items()):
        if why:
            fixed.setdefault(why, []).append(rank)
    return "; ".join(f"{listed(ranks)}: {why}" for why, ranks in fixed.items())


def _why_not_now(job: Job, gone: Collection[int]) -> str:
    if job.asked:
        return "a stop was asked for"
    if left := job.having(RankState.SUCCEEDED):
        return f"{listed(left)} left already"
    staying = [rank for rank in job.alive() if rank not in gone]
    if not staying:
        return "every rank is lost"
    if not gone:
        return "no other rank holds the state"
    return described((rank, "let go of its state") for rank in staying if rank in job.unreachable)


def _why_not_again(job: Job, gone: Collection[int], step: int) -> str:
    if step <= 0:
        return "no step was committed yet"
    rules = job.rules
    died = [(rank, *job.deaths.get(rank, (NEVER, 0))) for rank in sorted(gone)]
    doomed = [(rank, n) for rank, at, n in died if at == step and n >= rules.deaths]
    if doomed:
        return described((rank, f"died {times(count)} at step {step}") for rank, count in doomed)
    if job.replaced + len(gone) > rules.max_replacements:
        within = f"within {rules.replacement_period_s:g} s"
        return f"all {rules.max_replacements} replacements {within} are spent"
    return ""
