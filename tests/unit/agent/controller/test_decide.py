"""The controller's decisions for jobs without dumps: histories and single cases."""

from copy import deepcopy
from signal import SIGKILL, SIGTERM, SIGUSR1

import pytest
from support.histories.plain import (
    HISTORIES,
    ONE,
    ONE_AGAIN,
    STARTED_2,
    THREE,
    TWO,
    TWO_AGAIN,
    ask,
    gone,
    late,
    launch,
    no_start,
    play,
    replay,
    rules,
    tell,
    up,
)

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.controller.states import JobState, RankState
from agent.text.wording import describe_exit


@pytest.mark.parametrize(
    ("asked", "steps"), [row[1:] for row in HISTORIES], ids=[row[0] for row in HISTORIES]
)
def test_history(asked, steps):
    play(asked, steps)


IMPOSSIBLE = [
    ("a stop before the launch", TWO, [], ask(SIGTERM)),
    ("a signal before the launch", TWO, [], tell(SIGUSR1)),
    ("a worker before the launch", TWO, [], up(0)),
    ("a second launch", TWO, [launch()], launch()),
    ("a launch while running", ONE, [launch(), up(0)], launch()),
    ("a deadline where none is set", ONE, [launch(), up(0)], late("running")),
    ("a rank that does not exist", ONE, [launch()], up(1)),
]


@pytest.mark.parametrize(
    ("asked", "before", "event"),
    [row[1:] for row in IMPOSSIBLE],
    ids=[row[0] for row in IMPOSSIBLE],
)
def test_what_cannot_happen_raises_and_changes_nothing(asked, before, event):
    job = replay(asked, before)
    copy = deepcopy(job)
    with pytest.raises(KeyError):
        decide(job, event)
    assert job == copy


def test_every_action_but_a_deadline_says_why():
    for _, asked, steps in HISTORIES:
        job = Job(asked)
        for event, *_ in steps:
            decision = decide(job, event)
            assert all(
                action.reason
                for action in decision.actions
                if not isinstance(action, do.SetDeadline)
            )
            job = decision.job


def test_how_each_rank_ended_is_remembered():
    job = replay(THREE, [launch(), up(0), up(1), up(2), gone(0, 0), gone(1, 1), gone(2, -15)])
    assert job.ranks == {0: RankState.SUCCEEDED, 1: RankState.FAILED, 2: RankState.STOPPED}


def test_an_attempt_does_not_answer_for_the_failure_of_an_earlier_one():
    events = [
        launch(),
        up(0),
        gone(0, 1),
        up(0, 1),
        ask(SIGTERM),
        late("stopping", 1),
        late("killing", 1),
    ]
    job = replay(ONE_AGAIN, events)
    assert (job.state, job.now.failure) == (
        JobState.FAILED,
        "rank 0 cannot be killed (waited 10 s)",
    )


def test_long_lists_of_ranks_are_cut():
    many = rules(ranks=tuple(range(20)))
    reason = decide(replay(many, [launch()]), late("starting")).job.now.failure
    assert (
        reason
        == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... did not start within 600 s (--cluster-time-out)"
    )


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (0, "exited with code 0"),
        (255, "exited with code 255"),
        (-SIGKILL, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_exit_in_words(exit_code, words):
    assert describe_exit(exit_code) == words


def test_who_killed_itself_is_not_said_to_have_been_killed():
    failed = "its device reports an error: CUDA error: ECC"
    assert describe_exit(-SIGKILL, failed) == f"ended itself: {failed}"
    assert describe_exit(3, "ValueError: bad") == "exited with code 3"


def test_a_failed_start_of_a_rank_that_runs_changes_nothing():
    job = replay(TWO_AGAIN, [launch(), up(0)])
    assert decide(job, no_start(0)).job == job


@pytest.mark.parametrize("exit_code", [0, 1])
def test_an_exit_also_says_that_the_rank_had_started(exit_code):
    job = replay(ONE, [launch(), gone(0, exit_code)])
    assert job.state.is_end


@pytest.mark.parametrize("lost", ["", "node 1 is silent"])
def test_a_rank_that_is_killed_on_its_way_out_was_successful(lost):
    job = play(TWO, STARTED_2)
    job = decide(job, ev.WorkerExited(1, 0, -9, 60, is_over=True, lost=lost)).job
    assert (job.state, job.ranks[1]) == (JobState.RUNNING, RankState.SUCCEEDED)
    decision = decide(job, gone(0, 0))
    assert decision.job.state is JobState.SUCCEEDED
