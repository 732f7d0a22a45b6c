"""How a job that was asked to leave is judged: at one step, with 0, saved in time."""

from __future__ import annotations

import signal

import pytest

from msrun.trials.exit_verdict import judge_exit
from msrun.trials.history import DrillExit, DrillHistory, FinalState, RankLife, SavedStep, Strike
from msrun.trials.node_fault import NodeDeed, NodeFault
from msrun.trials.verdict import judge
from worker_hooks.drill.plan import LAUNCHER, Deed, Fault

STEPS = 6
GRACEFUL = Fault(LAUNCHER, 3, deed=Deed.REQUEST, number=signal.SIGTERM)
PREEMPTION = GRACEFUL._replace(deed=Deed.PREEMPT, grace_s=0.5)
STRIKE = Strike(0, 103.0, 3.0, 3, 0)


def life(first, last, run="a", begun=0.0):
    """A rank that trained these steps, one a second."""
    steps = range(first, last + 1)
    losses = {step: [float(step).hex()] for step in steps}
    return RankLife(run, 0, begun, losses, {step: begun + step for step in steps})


FINALS = {rank: FinalState(STEPS, "weights", f"private {rank}") for rank in (0, 1)}
REFERENCE = DrillHistory({rank: (life(1, STEPS),) for rank in (0, 1)}, FINALS)


def gone_on(first=4, last=(3, 3), **changes):
    """Both ranks left at their last steps; the job went on with `first`."""
    lives = {rank: (life(1, last[rank]), life(first, STEPS, "b", begun=10.0)) for rank in (0, 1)}
    fields = {"lives": lives, "finals": FINALS, "strikes": (STRIKE,)}
    return DrillHistory(**(fields | {"dumps": (SavedStep(103.2, 3, 9),)} | changes))


def judged(fault, history, *departures, exit_code=0):
    return judge((fault,), REFERENCE, history, exit_code=exit_code, departures=departures)


def test_an_exit_of_several_nodes_is_judged_alike():
    asked = NodeFault(1, 3, NodeDeed.REQUEST)
    outcome = judged(asked, gone_on(), DrillExit(0, 3.25), DrillExit(0, 20.0))
    assert outcome.verdict == "nothing lost; exited after 0.25 s"
    outcome = judged(asked, gone_on(last=(3, 4)), DrillExit(0, 3.25), DrillExit(0, 20.0))
    assert "the ranks exited at different steps: 0 at 3, 1 at 4" in outcome.verdict
    preempted = NodeFault(0, 3, NodeDeed.PREEMPT, grace_s=0.5)
    outcome = judged(preempted, gone_on(), DrillExit(-9, 3.5, is_killed=True), DrillExit(0, 20.0))
    assert outcome.verdict == "nothing lost; saved in time, killed after 0.5 s"


def test_a_graceful_exit_has_its_times():
    heard = {"time": 103.001, "event": "StopRequested", "signum": 15}
    outcome = judged(GRACEFUL, gone_on(events=(heard,)), DrillExit(0, 3.25), DrillExit(0, 20.0))
    assert outcome.verdict == "nothing lost; exited after 0.25 s"
    assert (outcome.runs, outcome.steps_lost, outcome.step_saved) == (2, 0, 3)
    assert outcome.noticed_s == pytest.approx(0.001) and outcome.left_s == pytest.approx(0.25)
    assert outcome.in_time is None


@pytest.mark.parametrize(
    ("number", "code", "sentence"),
    [
        (signal.SIGTERM, 143, "exit code 143 instead of 0"),
        (signal.SIGTERM, -9, "exit code -9 instead of 0"),
        (signal.SIGINT, 0, "exit code 0 instead of 130"),
        (signal.SIGINT, 130, ""),
        (signal.SIGUSR1, 0, ""),
    ],
)
def test_a_graceful_exit_ends_with_0_but_an_interrupt_is_told(number, code, sentence):
    outcome = judged(GRACEFUL._replace(number=number), gone_on(), DrillExit(code, 3.25))
    assert bool(outcome.broken) == bool(sentence)
    assert sentence in outcome.verdict


def test_a_request_before_all_ranks_have_registered_need_not_be_graceful():
    begun = {"time": 100.0, "event": "StartAttempt", "attempt": 0}
    first, second = (
        {"time": time, "event": "Registered", "rank": rank}
        for rank, time in enumerate((101.0, 102.0))
    )
    heard = {"time": 103.1, "event": "StopRequested", "signum": 15}
    left = DrillExit(143, 3.25)
    late = begun, first, heard, second | {"time": 103.2}
    other = begun, first, second, begun | {"time": 102.5}, heard
    all_in_time = begun, first, second, heard
    for events, is_broken in ((late, False), (other, False), (all_in_time, True)):
        history = gone_on(1, last=(0, 0), events=events)
        assert bool(judged(GRACEFUL, history, left).broken) == is_broken
    assert judged(GRACEFUL, gone_on(events=late), left).broken  # who has committed has registered


def test_ranks_that_leave_at_different_steps_break_the_promise():
    outcome = judged(GRACEFUL, gone_on(last=(3, 2)), DrillExit(0, 3.25))
    assert outcome.broken == ("the ranks exited at different steps: 1 at 2, 0 at 3",)
    never = gone_on()
    never.lives[1][0].commits.clear()
    (broken,) = judged(GRACEFUL, never, DrillExit(0, 3.25)).broken
    assert broken == "the ranks exited at different steps: 1 at 0, 0 at 3"


def test_a_graceful_exit_that_a_death_disturbs_need_not_be_graceful():
    faults = (GRACEFUL, Fault(1, 3))
    history = gone_on(last=(3, 2), strikes=(STRIKE, Strike(1, 103.1, 3.1, 3, 0)))
    assert judge_exit(faults, history, [DrillExit(143, 3.25)]).broken == ()


def test_a_step_that_is_trained_again_after_a_graceful_exit_is_lost():
    outcome = judged(GRACEFUL, gone_on(first=3), DrillExit(0, 3.25))
    assert outcome.verdict == "1 step lost; exited after 0.25 s"


def test_a_preemption_that_was_quick_enough():
    outcome = judged(PREEMPTION, gone_on(), DrillExit(0, 3.25), DrillExit(0, 20.0))
    assert outcome.verdict == "nothing lost; saved in time, exited after 0.25 s"
    assert outcome.in_time is True


def test_what_was_saved_before_the_kill_counts():
    outcome = judged(PREEMPTION, gone_on(), DrillExit(-9, 3.5, is_killed=True))
    assert outcome.verdict == "nothing lost; saved in time, killed after 0.5 s"
    assert outcome.broken == ()


def test_a_preemption_that_came_too_early_says_what_it_cost():
    outcome = judged(PREEMPTION, gone_on(1, dumps=()), DrillExit(-9, 3.5, is_killed=True))
    assert outcome.verdict == "3 steps lost; not saved in time, killed after 0.5 s"
    assert outcome.in_time is False and outcome.broken and outcome.weights_equal


def test_the_last_step_of_all_needs_no_other_commit():
    lives = {rank: (life(1, STEPS),) for rank in (0, 1)}
    strike = Strike(0, 106.0, 6.0, 6, 0)
    outcome = judged(PREEMPTION, DrillHistory(lives, FINALS, (strike,)), DrillExit(0, 6.1))
    assert outcome.in_time is True and outcome.broken == ()
    assert (
        judged(PREEMPTION, DrillHistory(lives, {}, (strike,)), DrillExit(-9, 6.5)).in_time is False
    )


def test_nobody_was_asked_or_it_was_called_off():
    assert judge_exit((Fault(1, 3),), gone_on(), [DrillExit(0, 9.0)]) is None
    assert judge_exit((GRACEFUL,), gone_on(strikes=()), [DrillExit(0, 9.0)]) is None
    assert judge_exit((GRACEFUL,), gone_on(), []) is None
