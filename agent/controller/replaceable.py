"""Which ranks are lost after a failure, and whether others can be started in their place. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from itertools import accumulate

from agent.controller import events as ev
from agent.controller.job import NEVER, Job, Repeated
from agent.controller.protection import of_script
from agent.controller.replication import why_not_held
from agent.controller.states import RankState
from agent.ranks.rank_map import RankMap
from agent.ranks.rank_set import RankSet
from agent.text.wording import describe_exit, described, listed, times
from worker_hooks.contract import protocol
from worker_hooks.contract.peer_lost import says_peer_lost


def ranks_to_replace(job: Job) -> tuple[int, ...]:
    """Ranks in whose place others are to be started, once the survivors are frozen.

    Those that are dead, hung, or did not even answer; else the one that raised before all others.
    A rank that raised after a death lives on: the exception is the consequence of that death. One
    whose script has ended cannot train again: it writes what it holds, and is then started anew.
    """
    now, answers = job.now, RankMap() if job.dump is None else job.dump.answers
    dead = job.ranks.all - job.ranks.in_state(RankState.RUNNING, RankState.SUCCEEDED)
    found = dead | now.hung | (now.registered.ranks - now.unreachable - answers.ranks)
    if not found and now.first_raised is not None:
        found = RankSet((now.first_raised,))
    # what is to be trained again needs all ranks, also those whose scripts have ended
    return tuple(found | now.exiting & job.alive()) if found else ()


def note_raised(job: Job, news: Collection[protocol.Raised]) -> Job:
    """The job once ranks are held at their top; the loss of a peer is no failure of their own."""
    now, own = job.now, [one for one in news if not says_peer_lost(one.error)]
    failures = {one.rank: one.error for one in own if one.rank not in now.failures}
    now = now._replace(
        raised=now.raised | RankSet(one.rank for one in news),
        failures=now.failures.with_all(failures),
        futile=next((one.error for one in reversed(own) if one.is_futile), now.futile),
    )
    return job._replace(now=now)


def note_own_failure(job: Job, event: ev.WorkerExited) -> Job:
    """The job once a rank failed by itself, if it said how; the loss of a peer is not its own."""
    if says_peer_lost(event.error):
        return job
    match event:
        case ev.WorkerExited(rank=rank, exit_code=code, error=error) if code > 0 and error:
            return job.with_own_failure(rank, f"{describe_exit(code)}: {error}")
        case ev.WorkerExited(rank=rank, exit_code=code) if code < 0 and rank in job.now.failures:
            # its exception, if it raised one, may be a consequence of what killed it
            return job._replace(now=job.now._replace(failures=job.now.failures.without(rank)))
        case _:
            return job


def blame_left_amid(job: Job, consequence: str) -> tuple[Job, str]:
    """The job once ranks that exited with 0 amid a step are lost, and why; others miss them."""
    left = job.now.left_amid
    cause = described((rank, f"exited with code 0 {where}") for rank, where in left.items())
    for rank, where in left.items():
        job = job.with_rank(rank, RankState.FAILED)
        job = job.with_own_failure(rank, f"exited with code 0 {where}")
    reason = f"{cause}, amid training ({consequence})"
    return job.with_failure(reason), reason


def with_deaths(job: Job, ranks: Iterable[int], step: int) -> Job:
    """The job once ``ranks`` were lost at ``step``."""
    before = {rank: job.deaths.get(rank, (NEVER, 0)) for rank in ranks}
    more = {rank: (step, count + 1 if at == step else 1) for rank, (at, count) in before.items()}
    return job._replace(
        deaths=job.deaths.with_all(more), repeated=_repeated(job, tuple(before), step)
    )


def _repeated(job: Job, ranks: Collection[int], step: int) -> Repeated:
    """How often in a row the script failed in the way in which one of ``ranks`` did now."""
    was, now = job.repeated, [job.now.failures[rank] for rank in ranks if rank in job.now.failures]
    if len(now) < len(ranks) or not now:  # a death or a hang may explain the other failures
        return Repeated()
    if was.step == step and was.failure in now:
        return was._replace(times=was.times + 1)
    return Repeated(step, now[0], 1)


def not_replacing(job: Job, why: str) -> Job:
    """The job that remembers why no rank is replaced, unless all stop for another reason."""
    return job if job.stop.why else job._replace(now=job.now._replace(not_replaced=why))


def why_not(job: Job, gone: Collection[int], step: int, *, is_in_memory: bool = False) -> str:
    """Why no others can be started in the place of ``gone``; empty: they can.

    Args:
        job: with every loss counted.
        gone: all that would be started anew.
        step: that all would resume from.
        is_in_memory: it is complete in the agent's memory, so no rank has to live on.
    """
    never = why_never(job) or _why_not_now(job, gone)
    able = job.alive() - (RankSet(gone) - job.now.exiting)
    if not never and not is_in_memory and not able:
        never = "every rank is lost"
    return never or _why_not_again(job, gone, step)


def why_never(job: Job) -> str:
    """Why no rank of this attempt can be replaced, whatever befalls it; empty: it can."""
    if job.policy.replace.why_off:
        return job.policy.replace.why_off
    if not job.policy.replace.is_on:
        return "replacing is off"
    if job.diverged:
        return job.diverged
    if not_held := why_not_held(job):
        return not_held
    if silent := job.ranks.all - job.since_restart.rejoining.ranks:
        return f"{listed(silent)} registered no state"
    return of_script(job)


def _why_not_now(job: Job, gone: Collection[int]) -> str:
    if job.stop.why:
        return "a stop was asked for"
    if finished := job.having(RankState.SUCCEEDED):
        return f"{listed(finished)} exited already"
    if job.lost_node:
        return "its node is lost, and no other one is awaited"
    if job.now.futile:
        return f"a new rank would fail as well ({job.now.futile})"
    if not gone:
        return "no other rank holds the state"
    unreachable = job.alive() - RankSet(gone) & job.now.unreachable
    return described((rank, "let go of its state") for rank in unreachable)


def note_lost_node(job: Job, rank: int) -> Job:
    """The job once ``rank`` is known to be lost with its node."""
    since = job.since_restart
    return job._replace(since_restart=since._replace(without_node=since.without_node | {rank}))


def units(job: Job, gone: Collection[int]) -> int:
    """How many replacements it counts as to start ``gone`` anew.

    A lost node is one, however many of its ranks the others have heard to be lost by now, and
    whatever those died of that died a moment before it; each rank of another node is one.
    """
    without_node, nodes = job.since_restart.without_node, job.policy.replace.nodes
    if not without_node or not nodes:
        return len(gone)
    firsts = tuple(accumulate(nodes, initial=0))
    lost = {bisect_right(firsts, rank) for rank in without_node}
    homes = [bisect_right(firsts, rank) for rank in gone]
    return len(lost.intersection(homes)) + sum(home not in lost for home in homes)


def _why_not_again(job: Job, gone: Collection[int], step: int) -> str:
    if step <= 0:
        return "no step was committed yet"
    replace = job.policy.replace
    same = job.repeated
    if same.step == step and same.times >= replace.failures:
        return f"the same failure {times(same.times)} at step {step} ({same.failure})"
    died = [(rank, *job.deaths.get(rank, (NEVER, 0))) for rank in sorted(gone)]
    doomed = [(rank, n) for rank, at, n in died if at == step and n >= replace.deaths]
    if doomed:
        return described((rank, f"died {times(count)} at step {step}") for rank, count in doomed)
    if job.replaced + units(job, gone) > replace.max_replacements:
        within = f"within {replace.period_s:g} s"
        return f"all {replace.max_replacements} replacements {within} are spent"
    return ""
