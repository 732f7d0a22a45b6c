"""The controller's decisions about replacements: histories and single cases."""

import pytest
from support.histories.dumps import cut, done, froze, holds, reg, running, threw, wrote
from support.histories.plain import gone, late, no_start, up, wish
from support.histories.replacements import (
    COMMITTING,
    DIED,
    HISTORIES,
    JOINING,
    MEMORY,
    REPLACED,
    REPLACING,
    THREE,
    asked,
    hangs,
    play,
    rejoins,
)

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Attempt
from agent.controller.states import JobState, RankState


@pytest.mark.parametrize(
    ("rules_", "steps"), [row[1:] for row in HISTORIES], ids=[row[0] for row in HISTORIES]
)
def test_history(rules_, steps):
    play(rules_, steps)


def test_what_is_in_memory_is_not_saved():
    job = play(THREE, REPLACING)
    assert (job.resume, job.saved_step, job.newest_step()) == (None, -1, 5)
    assert (job.memory.path, job.memory.step) == (MEMORY, 5)


def test_a_new_round_forgets_what_the_last_attempt_told():
    job = play(THREE, REPLACING)
    assert (job.attempt, job.restarts, job.replaced) == (1, 0, 1)
    assert job.now == Attempt()
    assert job.ranks == {0: RankState.RUNNING, 1: RankState.PENDING, 2: RankState.RUNNING}


@pytest.mark.parametrize(
    "event",
    [
        rejoins(0, 0),
        rejoins(1),  # a newcomer leaves nothing
        reg(0, 5),
        threw(2),
        cut(2),
        gone(2, -9),
        up(1),
        no_start(1),
        froze(0),
        wrote(0),
        done(MEMORY),
        late("replacing"),
        late("committing"),
        wish(),
        hangs(0),
        hangs(0, 1),
        ev.CheckpointFound(1, "/old", 9),
    ],
    ids=str,
)
def test_messages_of_an_older_attempt_change_nothing(event):
    job = play(THREE, REPLACING)
    decision = decide(job, event)
    assert (decision.job, decision.actions) == (job, ())


@pytest.mark.parametrize("steps", [REPLACED, JOINING, COMMITTING, DIED])
def test_a_replacement_that_is_long_ago_counts_no_more(steps):
    job = play(THREE, steps)
    before, ever = job.replaced, job.replaced_in_all
    for _ in range(3):
        decision = decide(job, ev.ReplacementAged())
        assert decision.actions == ()
        assert decision.job == job._replace(replaced=max(job.replaced - 1, 0))
        job = decision.job
    assert before in {0, 1}
    assert (job.replaced, job.replaced_in_all, ever) == (0, before, before)


def again(attempt, step, dump):
    """Rank 1 of three dies once more, at `step`, and is replaced."""
    steps = [froze(0, step, dump=dump), froze(2, step, dump=dump), wrote(0, dump=dump)]
    joins = [rejoins(0, attempt), rejoins(2, attempt)]
    return [
        gone(1, -9, attempt - 1),
        *steps,
        holds(2, dump=dump),
        done(MEMORY, dump),
        *joins,
        *(reg(rank, step, attempt) for rank in range(3)),
    ]


def test_deaths_at_one_step_are_counted_for_each_rank():
    job = play(THREE, running(3))
    for event in [*again(1, 5, 1), *again(2, 5, 2)]:
        job = decide(job, event).job
    assert (job.state, job.replaced, job.deaths) == (JobState.RUNNING, 2, {1: (5, 2)})
    third = [*again(3, 5, 3)[:3]]
    for event in third:
        decision = decide(job, event)
        job = decision.job
    assert job.now.not_replaced == "rank 1 died three times at step 5"
    assert isinstance(decision.actions[0], do.SaveRanks)
    assert decision.actions[0].place == 0


def test_another_step_begins_the_count_anew():
    job = play(THREE, running(3))
    for event in [*again(1, 5, 1), *again(2, 5, 2), *again(3, 6, 3), *again(4, 6, 4)]:
        job = decide(job, event).job
    assert (job.state, job.deaths) == (JobState.RUNNING, {1: (6, 2)})


REFUSES = "train.py: error: unrecognized arguments: --go"


def decided(rules_, events):
    job = play(rules_, REPLACING)
    for event in events:
        job = decide(job, event).job
    return job


def left(attempt, *, code=2, error=REFUSES):
    """The newcomer exists and exits by itself."""
    return up(1, attempt), ev.WorkerExited(1, attempt, code, None, error)


def test_a_newcomer_that_fails_twice_in_one_way_is_not_replaced_a_third_time():
    job = decided(THREE, left(1))
    assert (job.state, job.attempt, job.repeated.times) == (JobState.REPLACING, 2, 1)
    job = decided(THREE, (*left(1), *left(2)))
    assert job.state is JobState.COMMITTING
    same = f"the same failure twice at step 5 (exited with code 2: {REFUSES})"
    assert job.now.not_replaced == same


@pytest.mark.parametrize(
    "second",
    [left(2, error="another"), left(2, code=3), left(2, code=-9, error=""), left(2, error="")],
)
def test_failures_that_differ_are_not_the_same(second):
    job = decided(THREE, (*left(1), *second))
    assert job.now.not_replaced == "rank 1 died three times at step 5"  # whatever they were
    job = decided(THREE, (*left(1)[:1], gone(1, -9, 1)))
    assert (job.state, job.repeated.times) == (JobState.REPLACING, 0)


def raises(attempt, step, dump, error="ValueError: bad"):
    """Rank 1 raises at `step`, and is replaced."""
    others = [reg(rank, step, attempt) for rank in range(3)]
    return [
        threw(1, error, attempt - 1),
        *(froze(rank, step, dump=dump) for rank in range(3)),
        wrote(0, dump=dump),
        *(holds(rank, dump=dump) for rank in (1, 2)),
        done(MEMORY, dump),
        gone(1, 1, attempt - 1),
        *(rejoins(rank, attempt) for rank in (0, 2)),
        *others,
    ]


def test_an_exception_that_comes_again_at_its_step_is_the_script_s():
    job = play(THREE, running(3))
    for event in raises(1, 5, 1):
        job = decide(job, event).job
    assert (job.state, job.repeated.times) == (JobState.RUNNING, 1)
    for event in raises(2, 5, 2)[:5]:
        job = decide(job, event).job
    assert job.now.not_replaced == "the same failure twice at step 5 (ValueError: bad)"


def test_an_exception_that_a_new_rank_would_meet_too_costs_no_replacement():
    """A checkpoint that the disk does not take: the new rank would owe the same one."""
    job = play(THREE, running(3))
    first, *rest = raises(1, 5, 1)
    for event in [first._replace(is_futile=True), *rest[:4]]:
        job = decide(job, event).job
    assert job.now.not_replaced == "a new rank would fail as well (ValueError: bad)"


@pytest.mark.parametrize(("step", "error"), [(6, "ValueError: bad"), (5, "ValueError: worse")])
def test_one_at_another_step_or_another_one_is_replaced(step, error):
    job = play(THREE, running(3))
    for event in [*raises(1, 5, 1), *raises(2, step, 2, error)]:
        job = decide(job, event).job
    assert (job.state, job.replaced, job.repeated.times) == (JobState.RUNNING, 2, 1)


def test_replacements_are_no_restarts():
    job = play(asked(max_restarts=1, stalls=2), running(3))
    for event in [*again(1, 5, 1), *again(2, 6, 2), *again(3, 7, 3)]:
        job = decide(job, event).job
    assert (job.state, job.attempt, job.restarts, job.stalled) == (JobState.RUNNING, 3, 0, 0)
    for rank in range(3):
        job = decide(job, gone(rank, 1, 3)).job
    assert (job.state, job.attempt, job.restarts, job.stalled) == (JobState.STARTING, 4, 1, 0)
    assert job.best_step == 7


LOST_PEER = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:39091: Connection reset by peer"
AMID = ev.WorkerExited(1, 0, 0, 5, amid="in forward of step 6")
BLAMED = "rank 1 exited with code 0 in forward of step 6, amid training (rank 0 "


@pytest.mark.parametrize(
    "events",
    [
        (AMID, threw(0, LOST_PEER)),
        (threw(0, LOST_PEER), AMID),
        (AMID, ev.WorkerExited(0, 0, 1, 5, LOST_PEER)),
    ],
    ids=["exit first", "exception first", "peer died"],
)
def test_an_exit_with_0_amid_a_step_is_a_loss_once_a_peer_misses_it(events):
    job = play(THREE, running(3))
    for event in events:
        job = decide(job, event).job
    assert job.state is JobState.FREEZING
    assert job.now.failure.startswith(BLAMED)
    assert job.ranks[1] is RankState.FAILED
    for event in (froze(0), froze(2)) if job.ranks[0].is_alive else (froze(2),):
        decision = decide(job, event)
        job = decision.job
    prepared = [each.ranks for each in decision.actions if isinstance(each, do.PrepareRanks)]
    assert prepared == [(1,) if job.ranks[0].is_alive else (0, 1)]


@pytest.mark.parametrize("event", [threw(0), gone(0, -9), hangs(0)], ids=["bug", "death", "hang"])
def test_an_exit_with_0_is_not_blamed_for_what_did_not_miss_it(event):
    job = play(THREE, running(3))
    for each in (AMID, event):
        job = decide(job, each).job
    assert job.ranks[1] is RankState.SUCCEEDED
    assert "amid training" not in job.now.failure


def test_an_exit_with_0_is_not_blamed_where_a_death_explains_the_lost_peer():
    job = play(THREE, running(3))
    for each in (threw(0, LOST_PEER), gone(2, -9), AMID):
        job = decide(job, each).job
    assert job.ranks[1] is RankState.SUCCEEDED
    assert job.now.failure == "rank 2 was killed by SIGKILL"  # what rank 0 raised only follows


def test_all_may_exit_with_0_amid_a_step():
    job = play(THREE, running(3))
    for rank in range(3):
        job = decide(job, AMID.__class__(rank, 0, 0, 5, amid=AMID.amid)).job
    assert job.state is JobState.SUCCEEDED


def test_ranks_that_exit_with_0_amid_one_step_again_are_not_replaced_a_third_time():
    job = play(THREE, REPLACED)
    for attempt, dump in ((1, 2), (2, 3)):
        exited = ev.WorkerExited(1, attempt, 0, 5, amid=AMID.amid)
        for event in (exited, threw(0, LOST_PEER, attempt)):
            job = decide(job, event).job
        for event in (froze(0, dump=dump), froze(2, dump=dump), wrote(0, dump=dump)):
            job = decide(job, event).job
        if job.now.not_replaced:
            break
        for event in (holds(2, dump=dump), done(MEMORY, dump), up(1, attempt + 1)):
            job = decide(job, event).job
        for event in (rejoins(0, attempt + 1), rejoins(2, attempt + 1)):
            job = decide(job, event).job
        for rank in range(3):
            job = decide(job, reg(rank, 5, attempt + 1)).job
    assert attempt == 2
    assert job.now.not_replaced.startswith(
        "the same failure twice at step 5 (exited with code 0 in"
    )


@pytest.mark.parametrize(
    ("near", "writers"), [(range(2), (1,)), (range(1), (1,)), (range(2, 3), (2,)), (range(0), (1,))]
)
def test_the_state_is_written_where_it_need_not_travel_if_one_holds_it_there(near, writers):
    """Rank 0 dies: of the others those write that are on the controller's node, if any is."""
    job = play(THREE, running(3))
    replace = job.policy.replace._replace(near=near, has_nodes=True)
    job = job._replace(policy=job.policy._replace(replace=replace))
    for event in (gone(0, -9), froze(1)):
        job = decide(job, event).job
    decision = decide(job, froze(2))
    (save,) = (each for each in decision.actions if isinstance(each, do.SaveRanks))
    assert (save.place, save.writers) == (do.MEMORY, writers)


@pytest.mark.parametrize(
    ("near", "has_nodes", "writers"),
    [(range(2), True, 1), (range(3), True, 2), (range(1), True, 1), ((), False, 2), ((), True, 1)],
)
def test_what_no_rank_of_node_0_holds_is_written_whole_by_one(near, has_nodes, writers):
    """Rank 0 dies: of a large state the others share out what they write to the same memory."""
    job = play(THREE, running(3))
    replace = job.policy.replace._replace(near=near, has_nodes=has_nodes)
    job = job._replace(policy=job.policy._replace(replace=replace))
    for event in (gone(0, -9), froze(1)._replace(nbytes=1 << 30)):
        job = decide(job, event).job
    decision = decide(job, froze(2)._replace(nbytes=1 << 30))
    (save,) = (each for each in decision.actions if isinstance(each, do.SaveRanks))
    assert len(save.writers) == writers


def over(rank, attempt=0):
    return ev.RankExiting(rank, attempt)


def test_ranks_whose_scripts_have_ended_write_what_they_hold_and_are_started_anew():
    """Training is over, rank 1 still evaluates, and dies."""
    job = play(THREE, running(3))
    for event in (over(0), over(2), gone(1, -9), froze(0)):
        job = decide(job, event).job
    decision = decide(job, froze(2))
    (save,) = (each for each in decision.actions if isinstance(each, do.SaveRanks))
    assert (save.place, save.writers, save.digesters) == (do.MEMORY, (0,), (2,))
    job = decision.job
    for event in (wrote(0), holds(2)):
        job = decide(job, event).job
    decision = decide(job, done(MEMORY))
    (killed,) = (each for each in decision.actions if isinstance(each, do.SignalRanks))
    assert (killed.ranks, killed.signum) == ((0, 2), 9)
    assert killed.reason == "ranks 0, 2 had finished, and train again"
    job = decide(decision.job, gone(0, -9)).job
    decision = decide(job, gone(2, -9))
    (begun,) = (each for each in decision.actions if isinstance(each, do.ReplaceRanks))
    assert (begun.newcomers, begun.survivors) == ((0, 1, 2), ())
    assert decision.job.restarts == 0


def test_a_survivor_whose_script_ends_meanwhile_makes_another_round():
    job = play(THREE, REPLACING)
    decision = decide(job, over(2, 1))
    (killed,) = (each for each in decision.actions if isinstance(each, do.SignalRanks))
    assert killed.ranks == (2,)
    assert decision.job.state is JobState.REPLACING
    assert decision.job.since_restart.replacement.lost == {1, 2}


def test_a_rank_that_has_joined_may_end_its_script_before_the_others_join():
    """The memory holds the last step: nothing is left to train."""
    job = play(THREE, [*REPLACING, (reg(0, 5, 1), "replacing"), (reg(1, 5, 1), "replacing")])
    decision = decide(job, over(1, 1))
    assert decision.actions == ()
    decision = decide(decision.job, reg(2, 5, 1))
    assert decision.job.state is JobState.RUNNING
    assert decision.job.now.exiting == {1}


def test_it_is_started_anew_if_another_one_is_lost_before_that():
    job = play(THREE, [*REPLACING, (reg(0, 5, 1), "replacing"), (over(0, 1), "replacing")])
    decision = decide(job, gone(1, -9, 1))
    (killed,) = (each for each in decision.actions if isinstance(each, do.SignalRanks))
    assert (killed.ranks, killed.signum) == ((0,), 9)
    decision = decide(decision.job, gone(0, -9, 1))
    (begun,) = (each for each in decision.actions if isinstance(each, do.ReplaceRanks))
    assert (begun.newcomers, begun.survivors) == ((0, 1), (2,))


def test_ranks_that_exit_are_not_lost_while_nothing_fails():
    job = play(THREE, running(3))
    for event in (over(0), over(1), over(2), gone(0, 0), gone(1, 0), gone(2, 0)):
        decision = decide(job, event)
        job = decision.job
    assert job.state is JobState.SUCCEEDED
