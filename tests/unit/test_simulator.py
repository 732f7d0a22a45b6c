"""Random schedules of deaths, delays and losses against the controller's promises."""

import time
from collections import Counter
from dataclasses import replace

import pytest
from promises import BrokenPromiseError
from simulator import simulate

from agent import events as ev
from agent.controller import Decision, decide
from agent.state import JobState, RankState

SCHEDULES = 10_000
LIMIT_S = 10.0


def test_ten_thousand_schedules_keep_every_promise():
    began = time.process_time()
    ends = Counter()
    for seed in range(SCHEDULES):
        story = simulate(seed)
        ends[story.job.state] += 1
        ends["restarted"] += story.job.attempt > 0
    assert time.process_time() - began < LIMIT_S
    # the weather is such that no kind of end is rare
    assert min(ends[end] for end in (*(s for s in JobState if s.is_end), "restarted")) > 500


def test_a_seed_is_a_schedule():
    for seed in range(200):
        first, second = simulate(seed), simulate(seed)
        assert (first.events, first.actions) == (second.events, second.actions)


def without_finish(job, event):
    decision = decide(job, event)
    kept = (each for each in decision.actions if not isinstance(each, ev.Finish))
    return Decision(decision.job, tuple(kept))


def forgetting_the_request(job, event):
    decision = decide(job, event)
    return replace(decision, job=replace(decision.job, stop_signal=None))


def believing_old_news(job, event):
    if hasattr(event, "attempt"):
        event = replace(event, attempt=job.attempt)
    return decide(job, event)


def signalling_the_dead(job, event):
    decision = decide(job, event)
    known = tuple(rank for rank, state in job.ranks.items() if state is not RankState.PENDING)
    actions = (
        replace(each, ranks=known) if isinstance(each, ev.SignalRanks) else each
        for each in decision.actions
    )
    return replace(decision, actions=tuple(actions))


def without_a_budget(job, event):
    rules = job.rules
    decision = decide(replace(job, rules=replace(rules, max_restarts=9)), event)
    return replace(decision, job=replace(decision.job, rules=rules))


def blaming_the_last(job, event):
    decision = decide(job, event)
    died = isinstance(event, ev.WorkerExited) and event.exit_code != 0
    if died and not job.state.is_end and decision.job.failure:
        return replace(decision, job=replace(decision.job, failure=f"rank {event.rank} failed"))
    return decision


def never_killing(job, event):
    if isinstance(event, ev.DeadlinePassed) and event.state is JobState.STOPPING:
        return Decision(job)
    return decide(job, event)


BROKEN = [
    (without_finish, "waits for ever"),
    (forgetting_the_request, "after a stop was asked for|what happened is"),
    (believing_old_news, "simulate"),
    (signalling_the_dead, "are not alive"),
    (without_a_budget, "budget"),
    (blaming_the_last, "does not blame"),
    (never_killing, "waits for ever"),
]


@pytest.mark.parametrize(
    ("mutant", "promise"), BROKEN, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_broken_controller_is_noticed(mutant, promise):
    with pytest.raises(BrokenPromiseError, match=promise):
        for seed in range(1_000):
            simulate(seed, mutant)
