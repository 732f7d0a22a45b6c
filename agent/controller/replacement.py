"""Only what is lost is started again, the others live on: rounds, each with a new attempt's number.

Pure, like the controller. Theory in five lines:

* the checkpoint in memory stays the truth until all have joined: no update can begin before;
* a round begins when everybody who is not to live on is gone: nobody who is lost, and no newcomer
  of an earlier round that had not joined, can disturb it;
* whoever is lost in a round, or does not come out of its training function, makes another round;
  each counts against the budget, so there is an end;
* everything else that goes wrong (an exception, a start that fails, too much time, a stop) is a
  fall to the next rung: the agent alone writes the memory to disk, then all are stopped;
* an exception may be the consequence of a death that is heard of a little later.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.attempts import forgotten, release, signal_ranks
from agent.controller.dump import UNSAVED, Turn, commit_memory, give_up
from agent.controller.job import Job, MemoryState, Replacement
from agent.controller.replaceable import counted, excused, ranks_to_replace, why_not
from agent.controller.states import Condition, JobState, RankState
from agent.text.wording import describe_exit, listed, ranged
from worker_hooks.contract import protocol

DOUBT_S = 0.5  # within which the death that an exception follows from is heard of

Event = (
    ev.WorkerStarted
    | ev.StartFailed
    | ev.WorkerExited
    | protocol.Rejoining
    | protocol.Registered
    | protocol.Raised
    | ev.RankUnreachable
    | ev.DeadlinePassed
)


_Gone = ev.WorkerExited | ev.StartFailed


def begin(job: Job, path: str) -> Turn:
    """The checkpoint in memory is complete: whoever is lost and not gone yet, has to go."""
    assert job.dump is not None
    step = job.dump.step
    dump = job.dump._replace(is_committed=True, memory=path)
    job = job._replace(dump=dump, memory=MemoryState(path, step))
    gone = ranks_to_replace(job)
    job = counted(job, gone, step)
    if why := why_not(job, gone, step):
        return fall_back_to_disk(job, why)
    going = tuple(rank for rank in gone if job.ranks[rank].is_alive)
    held = tuple(rank for rank in going if rank in job.raised)
    mute = tuple(rank for rank in going if rank not in job.raised | job.hung)
    why = job.failure or "unknown"
    replacement = Replacement(why, frozenset(gone), frozenset(going), is_killing=not held)
    job = job._replace(replacement=replacement)
    if not going:
        return launch(job)._replace(condition=Condition.REPLACEABLE)
    actions = signal_ranks(mute, signals.SIGKILL, f"{listed(mute)} did not even answer")
    if held:
        actions += (release(held, why),)
    return Turn(job, Condition.REPLACEABLE, (*actions, deadline_s(job, job.rules.kill_s)))


def hear(job: Job, event: Event) -> Turn:
    """While replacing: what happened to a rank, or that it took too long."""
    match event:
        case ev.DeadlinePassed():
            return _lose_patience(job)
        case _ if _is_called_off(job, event.rank) and not isinstance(event, _Gone):
            why = f"rank {event.rank} came to life while it was called off"
            return wait(
                _existing(job, event.rank), signal_ranks((event.rank,), signals.SIGKILL, why)
            )
        case ev.StartFailed(rank=rank, why=why):
            return _start_failed(job.with_rank(rank, RankState.FAILED), rank, why)
        case ev.WorkerExited():
            return _exited(job, event)
        case ev.WorkerStarted(rank=rank):
            return wait(_existing(job, rank))
        case protocol.Rejoining(rank=rank):
            return _left(job, rank)
        case protocol.Registered():
            return _registered(_existing(job, event.rank), event)
        case protocol.Raised():
            return _raised(_existing(job, event.rank), event)
        case ev.RankUnreachable(rank=rank):
            job = _existing(job, rank)
            job = job._replace(unreachable=job.unreachable | {rank})
            return lose_more(job, (rank,), f"rank {rank} let go of its state")


def is_awaited(job: Job, event: protocol.Rejoining) -> bool:
    """Whether a round waits for this rank to leave its training function."""
    return job.replacement is not None and event.rank in job.replacement.leaving


def forget(job: Job) -> tuple[Job, tuple[do.Action, ...]]:
    """The agent's memory is given back once nobody can need it."""
    if not job.remembers:
        return job, ()
    if job.memory is None:  # never completed: ranks may still write there
        is_over = job.state is JobState.STARTING or job.state.is_end
    else:
        is_over = job.state not in {JobState.COMMITTING, JobState.REPLACING}
    if not is_over:
        return job, ()
    reason = f"nobody goes on from memory while the job is {job.state.value}"
    return job._replace(memory=None, remembers=False), (do.ForgetMemory(reason),)


# --- what happens in it ---------------------------------------------------------------------------


def _start_failed(job: Job, rank: int, why: str) -> Turn:
    if rank in under_way(job).going:
        return note_gone(job, rank)
    return fall_back_to_disk(job, f"rank {rank} could not be started: {why}")


def _exited(job: Job, event: ev.WorkerExited) -> Turn:
    rank, words = event.rank, f"rank {event.rank} {describe_exit(event.exit_code)}"
    job = job.with_rank(rank, RankState.FAILED if event.exit_code else RankState.SUCCEEDED)
    if event.step is not None:
        job = job.with_step(rank, event.step)
    if rank in under_way(job).going:
        return note_gone(job, rank)
    is_cause = job.is_failure_raised and event.exit_code != 0 and rank not in job.raised
    if job.failure is not None and is_cause:
        words = f"{words} ({job.failure})"
        job = job._replace(failure=words, is_failure_raised=False)
        job = job._replace(replacement=under_way(job)._replace(why=words))
    return lose_more(job, (rank,), words)


def _left(job: Job, rank: int) -> Turn:
    """It is out of its training function."""
    now = under_way(job)
    job = job._replace(replacement=now._replace(leaving=now.leaving - {rank}))
    is_last = now.leaving == {rank} and not now.going and not now.doubt
    return wait(job, (deadline_s(job, job.rules.join_s),) if is_last else ())


def _registered(job: Job, event: protocol.Registered) -> Turn:
    """It has joined, and stays where the memory is."""
    now, memory, rank = under_way(job), job.memory, event.rank
    assert memory is not None
    job = job._replace(unreachable=job.unreachable - {rank})
    job = job.with_step(rank, event.step)
    job = job._replace(why_fixed={**job.why_fixed, rank: event.why_fixed})
    if rank in now.going or not now.newcomers:
        return wait(job)
    if event.step != memory.step:
        return fall_back_to_disk(
            job, f"rank {rank} came back at step {event.step} instead of {memory.step}"
        )
    turn = _left(job, rank) if rank in now.leaving else wait(job)
    now = under_way(turn.job)
    job = turn.job._replace(replacement=now._replace(joined=now.joined | {rank}))
    is_last = len(under_way(job).joined) == len(job.ranks)
    if now.going or now.doubt or not is_last:
        return turn._replace(job=job)
    ranks, why = tuple(job.ranks), f"{ranged(now.lost)} replaced, every rank has joined"
    actions = (
        do.SetDeadline(JobState.RUNNING, job.attempt, None),
        do.Tell(ranks, protocol.GoOn(job.attempt), why),
    )
    return Turn(job._replace(replacement=None), Condition.ALL_JOINED, actions)


def _raised(job: Job, event: protocol.Raised) -> Turn:
    """A consequence of a death, known or not yet; else the script cannot be entered again."""
    now, words = under_way(job), f"rank {event.rank} raised {event.error}"
    job = job._replace(raised=job.raised | {event.rank})
    if now.going or now.doubt or not now.newcomers:
        return wait(job)
    job = job._replace(replacement=now._replace(doubt=words))
    return wait(job, (deadline_s(job, DOUBT_S),))


def _lose_patience(job: Job) -> Turn:
    """What was awaited did not come in time."""
    now, rules = under_way(job), job.rules
    if now.going and not now.is_killing:
        job = job._replace(replacement=now._replace(is_killing=True))
        still = [rank for rank in sorted(now.going) if job.ranks[rank] is RankState.RUNNING]
        why = f"{listed(still)} still alive {rules.kill_s:g} s after the order to leave"
        killed = signal_ranks(still, signals.SIGKILL, why)
        return wait(job, (*killed, deadline_s(job, rules.kill_s)))
    if now.going:
        return fall_back_to_disk(job, f"{listed(sorted(now.going))} cannot be killed")
    if now.doubt:
        return fall_back_to_disk(job, f"the script cannot be entered again: {now.doubt}")
    if now.leaving:
        late = sorted(now.leaving)
        within = f"within {rules.rejoin_s:g} s"
        return lose_more(job, late, f"{listed(late)} did not leave the training function {within}")
    late = [rank for rank in job.ranks if rank not in now.joined]
    return fall_back_to_disk(job, f"{listed(late)} did not join within {rules.join_s:g} s")


def _is_called_off(job: Job, rank: int) -> bool:
    return rank in under_way(job).going and job.ranks[rank] is RankState.PENDING


def _existing(job: Job, rank: int) -> Job:
    """It was perhaps heard of before its start was announced."""
    is_new = job.ranks[rank] is RankState.PENDING
    return job.with_rank(rank, RankState.RUNNING) if is_new else job


# --- rounds: who has to go, who is started, who lives on; and the fall


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
