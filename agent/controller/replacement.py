"""Only lost ranks are started again, the others live on: rounds, each with a new attempt's number.

Pure, like the controller. Theory in six lines:

* the checkpoint in memory stays the truth until all have joined: no update can begin before;
* a round begins when every rank that is not to live on is gone: then no lost rank, and no newcomer
  of an earlier round that had not joined, can disturb it;
* a rank that is lost in a round, or does not leave its training function, makes another round,
  also if it was the last one that lived on: all is in memory. Each counts against the budget, so
  there is an end;
* every other problem (an exception, a start that fails, too much time, a stop) is a fall to the
  next rung: the agent alone writes the memory to disk, then all ranks are stopped;
* an exception may be the consequence of a death that is reported a little later.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Collection, Iterable
from itertools import groupby, takewhile
from operator import attrgetter, itemgetter

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.attempts import give_up_devices, release, signal_ranks
from agent.controller.dump import UNSAVED, Turn, close_dump, commit_memory, give_up
from agent.controller.graceful_exit import mark_interrupted
from agent.controller.job import NEVER, Attempt, Job, MemoryState, Replacement
from agent.controller.replaceable import (
    not_replacing,
    note_own_failure,
    note_raised,
    ranks_to_replace,
    units,
    why_not,
    with_deaths,
)
from agent.controller.replication import begin_trial
from agent.controller.states import Condition, JobState, RankState
from agent.ranks.rank_set import RankSet
from agent.ranks.rows import due_in
from agent.spec.job_spec import CopyMode
from agent.text.wording import describe_exit, listed, ranged
from worker_hooks.contract import protocol
from worker_hooks.contract.peer_lost import with_consequence

DOUBT_S = 0.5  # how long to wait for a death of which an exception may be the consequence

_KEEPING = frozenset(
    {
        JobState.RUNNING,
        JobState.HOLDING,
        JobState.FREEZING,
        JobState.DUMPING,
        JobState.COMMITTING,
        JobState.REPLACING,
    }
)

Event = (
    ev.WorkerStarted
    | ev.StartFailed
    | ev.WorkerExited
    | protocol.Rejoining
    | protocol.Registered
    | protocol.Raised
    | ev.RankUnreachable
    | ev.RankExiting
    | ev.DeadlinePassed
)


def begin(job: Job, path: str, stale: tuple[int, ...] = ()) -> Turn:
    """The checkpoint in memory is complete: every lost rank that is not gone yet has to go."""
    dump = job.present_dump()
    step = dump.step
    dump = dump._replace(is_committed=True, memory=path)
    memory = MemoryState(path, step, dump.variants, dump.sides, dump.odd, stale)
    job = job._replace(dump=dump, memory=memory)
    gone = ranks_to_replace(job)
    job = with_deaths(job, gone, step)
    if why := why_not(job, gone, step, is_in_memory=True):
        return fall_back_to_disk(job, why)
    going = tuple(rank for rank in gone if job.ranks[rank].is_alive)
    held = tuple(rank for rank in going if rank in job.now.raised)
    silent = tuple(rank for rank in going if rank not in job.now.raised | job.now.hung)
    over = tuple(rank for rank in silent if rank in job.now.exiting)
    silent = tuple(rank for rank in silent if rank not in over)
    why = job.now.failure or "unknown"
    job = job.with_replacement(Replacement(why, RankSet(gone), RankSet(going), is_killing=not held))
    if not going:
        return launch(job)._replace(condition=Condition.REPLACEABLE)
    killed = signal_ranks(silent, signals.SIGKILL, f"{listed(silent)} did not even answer")
    killed += signal_ranks(over, signals.SIGKILL, f"{listed(over)} had finished, and train again")
    actions = (*killed, *release(held, why), _deadline(job, job.policy.timeouts.kill_s))
    return Turn(job, Condition.REPLACEABLE, actions)


def hear(job: Job, event: Event) -> Turn:
    """While replacing: what happened to a rank, or that it took too long."""
    match event:
        case ev.DeadlinePassed():
            return _on_deadline(job)
        case ev.StartFailed(rank=rank):
            return _start_failed(job.with_rank(rank, RankState.FAILED), rank, event.why)
        case ev.WorkerExited():
            return _exited(job, event)
        case _ if _is_cancelled(job, event.rank):
            why = f"rank {event.rank} came to life while it was called off"
            killed = signal_ranks((event.rank,), signals.SIGKILL, why)
            return wait(_existing(job, event.rank), killed)
        case ev.WorkerStarted(rank=rank):
            return wait(_existing(job, rank))
        case protocol.Rejoining(rank=rank):
            return _rejoining(job, rank)
        case protocol.Registered():
            return _registered(_existing(job, event.rank), event)
        case protocol.Raised():
            return _raised(_existing(job, event.rank), event)
        case ev.RankExiting() | ev.RankUnreachable():
            return _cannot_join(_existing(job, event.rank), event)


def is_awaited(job: Job, event: protocol.Rejoining) -> bool:
    """Whether a round waits for this rank to leave its training function."""
    replacement = job.since_restart.replacement
    return replacement is not None and event.rank in replacement.leaving


def absorb_rejoining(job: Job, news: Iterable[protocol.Rejoining]) -> tuple[Job, int]:
    """While replacing: take survivors that leave their training function, as long as more have to.

    Returns:
        The job after them, and how many it has taken.
    """
    replacement = job.since_restart.replacement
    if job.state is not JobState.REPLACING or replacement is None:
        return job, 0
    present = takewhile(lambda one: one.attempt == job.attempt, news)
    leaving = replacement.leaving
    taken = due_in(present, attrgetter("rank"), leaving - replacement.going, leaving)
    left = replacement._replace(leaving=leaving - RankSet(taken))
    return job.with_replacement(left), len(taken)


def absorb_registered(job: Job, news: Iterable[protocol.Registered]) -> tuple[Job, int]:
    """Take ranks that are there as a job begins, or that join at the step of the memory.

    The latter while others have to.

    Returns:
        The job after them, and how many it has taken.
    """
    replacement = job.since_restart.replacement
    if job.state is not JobState.REPLACING:
        alive, now = job.alive() if _is_beginning(job) else RankSet(), job.attempt
        there = list(takewhile(lambda one: one.attempt == now and one.rank in alive, news))
        return _with_rows(job, there), len(there)
    if replacement is None or not replacement.newcomers:
        return job, 0
    step = job.present_memory().step
    present = takewhile(lambda one: one.attempt == job.attempt and one.step == step, news)
    missing = job.ranks.all - replacement.joined
    due = missing & job.having(RankState.RUNNING) - replacement.going - replacement.leaving
    taken = due_in(present, attrgetter("rank"), due, missing)
    joined = replacement._replace(joined=replacement.joined | RankSet(taken))
    return _with_rows(job, taken.values()).with_replacement(joined), len(taken)


def _is_beginning(job: Job) -> bool:
    """Whether a rank that is there means nothing to people yet: nothing is compared so far."""
    is_new = job.state in {JobState.STARTING, JobState.RUNNING} and not job.remembers
    known = job.since_restart
    return is_new and len(job.ranks) > 1 and known.is_warm and known.comparison.compared == NEVER


def _with_rows(job: Job, taken: Iterable[protocol.Registered]) -> Job:
    for _, row in groupby(taken, itemgetter(slice(1, None))):  # all but the rank
        alike = list(row)
        job = with_registered(job, alike[0], RankSet(one.rank for one in alike))
    return job


def forget(job: Job) -> tuple[Job, tuple[do.Action, ...]]:
    """Free the agent's memory once it cannot be needed any more."""
    if not job.remembers:
        return job, ()
    if job.memory is None:  # never completed: ranks may still write there
        is_over = job.state is JobState.STARTING or job.state.is_end
    else:
        # a replacement may be confirmed while the next dump is under way, which may still fail
        is_confirmed = job.state is JobState.RUNNING and not job.since_restart.trial
        is_over = is_confirmed or job.state not in _KEEPING
    if not is_over:
        return job, ()
    reason = f"no rank resumes from memory while the job is {job.state.value}"
    return job._replace(memory=None, remembers=False), (do.ForgetMemory(reason),)


# --- what happens in it ---------------------------------------------------------------------------


def _start_failed(job: Job, rank: int, why: str) -> Turn:
    if rank in job.present_replacement().going:
        return _note_gone(job, rank)
    return fall_back_to_disk(job, f"rank {rank} could not be started: {why}")


def _exited(job: Job, event: ev.WorkerExited) -> Turn:
    rank, failure = event.rank, job.now.failure
    why = f"rank {rank} {describe_exit(event.exit_code, event.error)}"
    job = note_own_failure(job, event)
    job = job.with_rank(rank, RankState.FAILED if event.exit_code else RankState.SUCCEEDED)
    if event.step is not None:
        job = job.with_step(rank, event.step)
    replacement = job.present_replacement()
    if rank in replacement.going:
        return _note_gone(job, rank)
    is_cause = job.now.is_failure_raised and event.exit_code != 0 and rank not in job.now.raised
    if failure is not None and is_cause:
        why = with_consequence(why, failure)
        job = job.with_failure(why).with_replacement(replacement._replace(why=why))
    return lose_more(job, (rank,), why)


def _rejoining(job: Job, rank: int) -> Turn:
    """It has left its training function."""
    replacement = job.present_replacement()
    is_last = replacement.leaving == {rank} and not replacement.going and not replacement.doubt
    job = job.with_replacement(replacement._replace(leaving=replacement.leaving - {rank}))
    return wait(job, (_deadline(job, job.policy.replace.join_s),) if is_last else ())


def _cannot_join(job: Job, event: ev.RankExiting | ev.RankUnreachable) -> Turn:
    rank = event.rank
    if isinstance(event, ev.RankExiting):
        job = job._replace(now=job.now._replace(exiting=job.now.exiting | {rank}))
        if rank in job.present_replacement().joined:
            return wait(job)  # nothing was left to train, and it is kept until the others joined
        return lose_more(job, (rank,), f"the script of rank {rank} has ended")
    now = job.now._replace(unreachable=job.now.unreachable | {rank})
    return lose_more(job._replace(now=now), (rank,), f"rank {rank} {event.why}")


def _registered(job: Job, event: protocol.Registered) -> Turn:
    """It has joined, and stays at the step of the memory."""
    rank, memory = event.rank, job.present_memory()
    job = with_registered(job, event)
    replacement = job.present_replacement()
    if rank in replacement.going or not replacement.newcomers:
        return wait(job)
    if event.step != memory.step:
        return fall_back_to_disk(
            job, f"rank {rank} came back at step {event.step} instead of {memory.step}"
        )
    turn = _rejoining(job, rank) if rank in replacement.leaving else wait(job)
    replacement = turn.job.present_replacement()
    replacement = replacement._replace(joined=replacement.joined | {rank})
    job = turn.job.with_replacement(replacement)
    is_last = len(replacement.joined) == len(job.ranks)
    if replacement.going or replacement.doubt or not is_last:
        return turn._replace(job=job)
    why = f"{ranged(replacement.lost)} replaced, every rank has joined"
    actions = (
        do.SetDeadline(JobState.RUNNING, job.attempt, None),
        do.Tell(tuple(job.ranks), protocol.GoOn(job.attempt), why),
    )
    since = job.since_restart._replace(replacement=None, without_node=RankSet())
    return Turn(job._replace(since_restart=since), Condition.ALL_JOINED, actions)


def with_registered(job: Job, event: protocol.Registered, ranks: RankSet | None = None) -> Job:
    """The job once a rank's state can be saved, perhaps again after its link was closed.

    ``ranks``: all that have said the same, that rank included.
    """
    ranks = RankSet((event.rank,)) if ranks is None else ranks
    now, known = job.now, job.since_restart
    if now.unreachable & ranks:
        now = now._replace(unreachable=now.unreachable - ranks)
    rejoining = known.rejoining.noted(ranks, event.not_replaceable_why)
    comparison = known.comparison
    if event.compares:
        comparison = comparison._replace(awaited=comparison.awaited | ranks)
    rehearses = event.rehearses
    is_auto = job.policy.dump.copies is CopyMode.AUTO
    not_kept = known.not_kept or (event.not_kept_why if is_auto else "")
    is_kept = event.keeper and not not_kept
    keeping = known.keeping | ranks if is_kept else known.keeping - ranks
    known = known._replace(
        rejoining=rejoining,
        rehearses=rehearses,
        comparison=comparison,
        keeping=keeping,
        not_kept=not_kept,
    )
    if event.not_copied_why:
        known = known._replace(copies=known.copies._replace(why_not=event.not_copied_why))
    steps = dict.fromkeys(ranks, event.step)
    return job._replace(now=now, since_restart=known).with_steps(steps)


def _raised(job: Job, event: protocol.Raised) -> Turn:
    """A consequence of a death, known or not yet; else the script cannot be entered again."""
    replacement = job.present_replacement()
    job = note_raised(job, (event,))
    if replacement.going or replacement.doubt or not replacement.newcomers:
        return wait(job)
    doubt = f"rank {event.rank} raised {event.error}"
    job = job.with_replacement(replacement._replace(doubt=doubt))
    return wait(job, (_deadline(job, DOUBT_S),))


def _on_deadline(job: Job) -> Turn:
    """What was awaited did not come in time."""
    replacement, policy = job.present_replacement(), job.policy
    if replacement.going and not replacement.is_killing:
        job = job.with_replacement(replacement._replace(is_killing=True))
        going = sorted(replacement.going)
        still = [rank for rank in going if job.ranks[rank] is RankState.RUNNING]
        kill_s = policy.timeouts.kill_s
        why = f"{listed(still)} still alive {kill_s:g} s after the order to exit"
        killed = signal_ranks(still, signals.SIGKILL, why)
        return wait(job, (*killed, _deadline(job, kill_s)))
    if replacement.going:
        return fall_back_to_disk(job, f"{listed(sorted(replacement.going))} cannot be killed")
    if replacement.doubt:
        return fall_back_to_disk(job, f"the script cannot be entered again: {replacement.doubt}")
    if replacement.leaving:
        late = sorted(replacement.leaving)
        within = f"within {policy.replace.rejoin_s:g} s"
        return lose_more(job, late, f"{listed(late)} did not leave the training function {within}")
    late = [rank for rank in job.ranks if rank not in replacement.joined]
    within = f"within {policy.replace.join_s:g} s"
    return fall_back_to_disk(job, f"{listed(late)} did not join {within}")


def _is_cancelled(job: Job, rank: int) -> bool:
    return rank in job.present_replacement().going and job.ranks[rank] is RankState.PENDING


def _existing(job: Job, rank: int) -> Job:
    """The job once a rank exists: it may speak before its start is announced."""
    is_new = job.ranks[rank] is RankState.PENDING
    return job.with_rank(rank, RankState.RUNNING) if is_new else job


# --- rounds, and the fall -------------------------------------------------------------------------


def launch(job: Job) -> Turn:
    """A round begins: every rank that had to go is gone."""
    replacement, memory = job.present_replacement(), job.present_memory()
    survivors = job.alive()
    newcomers = tuple(job.ranks.all - survivors)
    failure = job.now.failure or replacement.why
    job, given_up = give_up_devices(job, newcomers)
    cost = units(job, newcomers)
    job = job._replace(
        attempt=job.attempt + 1,
        now=Attempt(),
        replaced=job.replaced + cost,
        replaced_in_all=job.replaced_in_all + len(newcomers),
        ranks=job.ranks.with_all(newcomers, RankState.PENDING),
        since_restart=job.since_restart._replace(
            reached=job.newest_step(),
            replacement=replacement._replace(
                is_killing=False,
                newcomers=RankSet(newcomers),
                leaving=survivors,
                joined=RankSet(),
                doubt="",
            ),
        ),
    )
    job = begin_trial(job, replacement.lost, memory.step)
    replace = do.ReplaceRanks(
        job.attempt,
        survivors=tuple(survivors),
        newcomers=newcomers,
        path=memory.path,
        step=memory.step,
        reason=_describe_round(failure, memory.step, newcomers, survivors),
        devices=job.devices.visible,
        rehearses=job.since_restart.rehearses,
    )
    reminders = [do.RemindReplaced(job.policy.replace.period_s) for _ in range(cost)]
    # without survivors nobody has to leave the training function first
    policy = job.policy.replace
    deadline = _deadline(job, policy.rejoin_s if survivors else policy.join_s)
    return wait(job, (*given_up, replace, *reminders, deadline))


def _describe_round(
    failure: str, step: int, newcomers: Iterable[int], survivors: Collection[int]
) -> str:
    """``rank 3 was killed by SIGKILL in step 413; replacing it, ranks 0-2 keep running``.

    ``step``: the newest commit; people count the step under way.
    """
    new, old = ranged(newcomers), ranged(survivors)
    where = "" if " of step " in failure else f" in step {step + 1}"
    if not survivors:
        return f"{failure}{where}; replacing all ranks, from memory"
    whom = new
    if failure.startswith(f"{new} "):
        whom = "it" if new.startswith("rank ") else "them"
    verb = "keeps" if old.startswith("rank ") else "keep"
    return f"{failure}{where}; replacing {whom}, {old} {verb} running"


def lose_more(job: Job, ranks: Iterable[int], why: str) -> Turn:
    """More ranks are lost, dead or not: another round, if there can be one."""
    replacement, memory = job.present_replacement(), job.present_memory()
    new = RankSet(ranks) - replacement.going
    if not new:
        return wait(job)
    now = job.now._replace(failure=job.now.failure or why)
    job = with_deaths(job._replace(now=now), new, memory.step)
    # newcomers that have not joined may know the broken group, and cannot be ordered out of it;
    # nor can ranks whose scripts have ended
    idle = replacement.newcomers - replacement.joined | now.exiting
    leaving = (new | idle) & job.alive() - replacement.going
    going = replacement.going | leaving
    gone = going | {rank for rank, state in job.ranks.items() if not state.is_alive}
    if not_again := why_not(job, gone, memory.step, is_in_memory=True):
        return fall_back_to_disk(job, not_again)
    job = job.with_replacement(
        replacement._replace(
            lost=replacement.lost | new,
            going=going,
            is_killing=replacement.is_killing if replacement.going else True,
            leaving=replacement.leaving - going,
        )
    )
    if not going:
        return launch(job)
    if not leaving:
        return wait(job)
    killed = [rank for rank in sorted(leaving) if job.ranks[rank] is RankState.RUNNING]
    actions = signal_ranks(killed, signals.SIGKILL, f"{why}; {listed(killed)} cannot join then")
    if job.having(RankState.PENDING):
        actions += (do.CancelStarts(why),)
    return wait(job, (*actions, _deadline(job, job.policy.timeouts.kill_s)))


def fall_back_to_disk(job: Job, why: str) -> Turn:
    """The next rung: what is in memory goes to disk, unless it is there already."""
    replacement = job.since_restart.replacement
    failure = job.now.failure if replacement is None else replacement.why
    job = not_replacing(job, why).with_replacement(None)
    job = job._replace(now=job.now._replace(failure=failure, is_failure_raised=False))
    return _flush_memory(job, f"no rank is replaced: {why}")


def undo(job: Job) -> Turn:
    """The ranks differ after a replacement: all return to the checkpoint that it began from."""
    job = job.with_failure(job.diverged)
    job = not_replacing(job, "it was tried, and the ranks differed")
    if job.now.exit is not None:  # at a step that is not the one that is kept
        job = job.with_exit(
            mark_interrupted(job, job.diverged).present_exit()._replace(is_held=False)
        )
    turn = _flush_memory(job, job.diverged)
    is_open = job.state in {JobState.FREEZING, JobState.DUMPING}
    if turn.condition is Condition.GIVEN_UP and is_open and not turn.actions:
        return close_dump(turn.job, job.present_dump(), turn.job.now.outcome)
    return turn


def _flush_memory(job: Job, why: str) -> Turn:
    """The checkpoint in memory goes to disk, unless it is there already, and all ranks stop."""
    memory = job.present_memory()
    if job.is_saved(memory.step):
        return Turn(job._replace(now=job.now._replace(outcome=job.kept())), Condition.GIVEN_UP)
    dump = job.present_dump()._replace(
        step=memory.step,
        memory=memory.path,
        variants=memory.variants,
        sides=memory.sides,
        odd=memory.odd,
        remark="",
    )
    if not job.saves():
        return give_up(job, dump, UNSAVED)
    return commit_memory(job, dump, 0, why)


def _note_gone(job: Job, rank: int) -> Turn:
    """A rank that had to go is gone, in whatever way."""
    replacement = job.present_replacement()
    going = replacement.going - {rank}
    job = job.with_rank(rank, RankState.FAILED)
    job = job.with_replacement(replacement._replace(going=going))
    return wait(job) if going else launch(job)


def wait(job: Job, actions: tuple[do.Action, ...] = ()) -> Turn:
    """The round continues."""
    return Turn(job, Condition.ANSWERS_AWAITED, actions)


def _deadline(job: Job, seconds: float) -> do.SetDeadline:
    return do.SetDeadline(JobState.REPLACING, job.attempt, seconds)
