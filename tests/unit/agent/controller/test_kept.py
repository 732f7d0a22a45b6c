"""What killed ranks have left in their memory: when it is read, and when it counts for nothing."""

from dataclasses import replace
from signal import SIGTERM

import pytest
from support.histories import kept
from support.histories.replacements import play
from support.simulator import mutants
from support.simulator.kept import is_end

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.attempts import Decision
from agent.controller.decide import decide
from agent.controller.drain import write_copy
from agent.controller.job import MemoryState
from agent.controller.replication import kept_state
from agent.controller.states import JobState, RankState
from agent.ranks.rank_map import RankMap
from agent.ranks.rank_set import RankSet
from worker_hooks.contract import protocol


@pytest.mark.parametrize(
    ("rules_", "steps"),
    [row[1:] for row in kept.HISTORIES],
    ids=[row[0] for row in kept.HISTORIES],
)
def test_history(rules_, steps):
    play(rules_, steps)


def test_as_long_as_a_rank_lives_nothing_is_read():
    job = play(kept.TWO, [*kept.training(2), kept.FIRST])
    assert job.now.kept
    assert kept_state(job) is None


def test_an_order_to_read_says_who_holds_the_same():
    job = play(kept.THREE, kept.NOW_ALL)
    (order,) = (
        each for each in decide(job, kept.killed(2, 7)).actions if isinstance(each, do.CommitDump)
    )
    assert (order.variants, order.holders) == (((0,), (1,), (2,)), ((0,), (1,), (2,)))


def never_reading(job, event):
    if isinstance(event, ev.WorkerExited):
        event = replace(event, kept=())
    return decide(job, event)


def reading_while_one_lives(job, event):
    decision = decide(job, event)
    if decision.job.state is JobState.FREEZING and decision.job.now.kept:
        dead = {rank for rank in decision.job.ranks if rank not in decision.job.alive()}
        (step, *_), writer = decision.job.now.kept[min(dead)], min(dead)
        memory = MemoryState("", step, ((writer,),))
        turn = write_copy(decision.job, memory, is_kept=True)
        return Decision(turn.job._replace(state=JobState.COMMITTING), turn.actions)
    return decision


def taking_an_older_step(job, event):
    if isinstance(event, ev.WorkerExited):
        event = replace(event, kept=event.kept[1:])
    return decide(job, event)


def taking_it_of_another_rank(job, event):
    decision = decide(job, event)
    told = (
        replace(each, variants=tuple((rank + 1,) for (rank,) in each.variants))
        if isinstance(each, do.CommitDump) and each.is_kept
        else each
        for each in decision.actions
    )
    return decision._replace(actions=tuple(told))


def forgetting_what_it_killed_them_for(job, event):
    decision = decide(job, event)
    now = decision.job.now._replace(is_kept_next=False)
    return decision._replace(job=decision.job._replace(now=now))


def asking_the_silent_to_exit(job, event):
    """Those that do not answer, where none is dead whose memory is to be read with theirs."""
    decision = decide(job, event)
    if not decision.job.now.is_kept_next or decision.job.now.kept:
        return decision
    told = (
        replace(each, signum=SIGTERM) if isinstance(each, do.SignalRanks) else each
        for each in decision.actions
    )
    now = decision.job.now._replace(is_kept_next=False)
    return Decision(decision.job._replace(now=now), tuple(told))


def killing_whom_it_need_not(job, event):
    if getattr(event, "attempt", job.attempt) != job.attempt:
        return decide(job, event)
    known = job.since_restart._replace(keeping=RankSet(job.ranks))
    return decide(job._replace(since_restart=known), event)


def ending_notes_amid_a_death(job, event):
    decision = decide(job, event)
    why = decision.job.since_restart.not_kept
    is_heard = isinstance(event, protocol.NotesMeasured) and event.attempt == job.attempt
    if not is_heard or not why or job.state.is_end:
        return decision
    told = do.Tell(tuple(job.having(RankState.RUNNING)), protocol.EndNotes(why), why)
    return decision._replace(actions=(told,))


def ending_notes_of_one_rank(job, event):
    decision = decide(job, event)
    told = (
        replace(each, ranks=each.ranks[:1]) if is_end(each) else each for each in decision.actions
    )
    return decision._replace(actions=tuple(told))


def ending_cheap_notes(job, event):
    if isinstance(event, protocol.NotesMeasured):
        event = event._replace(cost_s=10 * event.cost_s)
    return decide(job, event)


def reading_no_step_before(job, event):
    if isinstance(event, ev.CommitFailed) and event.is_state and job.present_dump().is_kept:
        job = job._replace(now=job.now._replace(kept=RankMap()))
    return decide(job, event)


def reading_the_same_step_again(job, event):
    if not isinstance(event, ev.CommitFailed) or not event.is_state:
        return decide(job, event)
    tried = job.present_dump()
    return decide(job._replace(dump=tried._replace(step=tried.step + tried.is_kept)), event)


BROKEN = [
    (reading_no_step_before, "is not read in the memory of the dead"),
    (reading_the_same_step_again, "is left"),
    (ending_notes_amid_a_death, "after NotesMeasured|is freed"),
    (ending_notes_of_one_rank, "that is dear"),
    (ending_cheap_notes, "but notes are cheap"),
    (never_reading, "is not read in the memory of the dead"),
    (reading_while_one_lives, "is left"),
    (taking_an_older_step, "is left|is not read"),
    (taking_it_of_another_rank, "is left"),
    (forgetting_what_it_killed_them_for, "is not read|is not saved"),
    (asking_the_silent_to_exit, "nobody reads|is not saved"),
    (killing_whom_it_need_not, "SIGKILL"),
]


@mutants.cases(BROKEN)
def test_a_broken_controller_is_noticed(mutant, promise):
    mutants.assert_noticed(mutant, promise)
