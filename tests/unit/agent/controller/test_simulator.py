"""Random schedules of deaths, delays and losses against the controller's promises."""

from dataclasses import replace

import pytest
from support.policies import altered_policy
from support.simulator import mutants
from support.simulator.kinds import altered
from support.simulator.mutants import (
    attempting,
    believing,
    changing,
    seeing,
    waiting_for_ever,
    without,
)
from support.simulator.node import census, simulate, too_rare

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.attempts import Decision
from agent.controller.decide import decide
from agent.controller.job import NEVER
from agent.controller.states import JobState, RankState
from agent.ranks.rank_map import RankMap
from agent.ranks.rank_set import RankSet
from worker_hooks.contract import protocol

SCHEDULES, PARTS = 100_000, 20  # parts that the workers of pytest share
# of the cost of a schedule, 1,700 to 2,600 at present: a busy machine has less cache for it
LIMIT = 5_000

# the weather is such that nothing of this is rare: at least so many times in 12,000
SEEN = {
    80: (
        "no majority",
        "elsewhere",
        "crash loop",
        "CommitFailed",
        "replaced",
        "let on",
        "StartRefused",
        "RefuseRanks",
        "CheckpointFound",
    ),
    300: (
        "from a copy",
        "StateCopied",
        "PrepareRanks",
        "ReplaceRanks",
        "Rejoining",
        "from memory",
        "RankHung",
        "written again",
        "HoldRanks",
        "Proceed",
        "Standing",
        "ExitRequested",
        "ExitRequestedByFile",
        "DumpProgressed",
        "SaveFailed",
        "Digested",
        "RankUnreachable",
    ),
    50: ("gracefully", "odd"),
    150: ("Leave", "Dismiss"),
    200: ("Progress",),
    600: ("to memory", "ForgetMemory"),
    800: ("succeeded", "failed", "stopped", "restarted", "Raised", "AbandonDump"),
    1_000: ("FreezeRanks", "SaveRanks", "CommitDump", "DumpCommitted", "Release"),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_hundred_thousand_schedules_keep_every_promise(part):
    count = SCHEDULES // PARTS
    seen = census(part * count, count)
    assert seen["Finish"] == count
    assert seen["cost"] < LIMIT
    assert too_rare(seen, SEEN, count) == []


def test_a_seed_is_a_schedule():
    for seed in range(200):
        first, second = simulate(seed), simulate(seed)
        assert (first.events, first.actions) == (second.events, second.actions)


def without_finish(job, event):
    decision = decide(job, event)
    kept = (each for each in decision.actions if not isinstance(each, do.Finish))
    return Decision(decision.job, tuple(kept))


def forgetting_the_request(job, event):
    decision = decide(job, event)
    return decision._replace(
        job=decision.job._replace(stop=decision.job.stop._replace(signum=None))
    )


def believing_old_news(job, event):
    if hasattr(event, "attempt"):
        event = altered(event, attempt=job.attempt)
    return decide(job, event)


def signalling_the_dead(job, event):
    decision = decide(job, event)
    known = [rank for rank, state in job.ranks.items() if state is not RankState.PENDING]
    actions = (
        replace(each, ranks=tuple({*each.ranks, *known}))
        if isinstance(each, do.SignalRanks)
        else each
        for each in decision.actions
    )
    return decision._replace(actions=tuple(actions))


def without_a_budget(job, event):
    policy = job.policy
    decision = decide(job._replace(policy=policy._replace(max_restarts=9)), event)
    return decision._replace(job=decision.job._replace(policy=policy))


def blaming_the_last(job, event):
    decision = decide(job, event)
    died = isinstance(event, ev.WorkerExited) and event.exit_code != 0
    if died and not job.state.is_end and decision.job.now.failure:
        return decision._replace(job=attempting(decision.job, failure=f"rank {event.rank} failed"))
    return decision


def never_killing(job, event):
    if isinstance(event, ev.DeadlinePassed) and event.state is JobState.STOPPING:
        return Decision(job)
    return decide(job, event)


def forgetting_dumps(job, event):
    decision = decide(job, event)
    if decision.job.state is JobState.STARTING:
        return decision._replace(job=decision.job._replace(dump=None))
    return decision


def forgetting_what_is_saved(job, event):
    decision = decide(job, event)
    return decision._replace(job=decision.job._replace(resume=job.resume))


def believing_answers_to_old_orders(job, event):
    if isinstance(event, protocol.Written) and job.dump is not None:
        event = altered(event, round=job.dump.round)
    return decide(job, event)


def taking_the_oldest_step(job, event):
    if isinstance(event, protocol.Frozen):
        event = altered(event, step=1_000 - event.step)
    return decide(job, event)


def not_comparing(job, event):
    if isinstance(event, protocol.Written) and job.dump is not None:
        job = job._replace(dump=job.dump._replace(digesting=RankSet()))
    return decide(job, event)


def not_waiting_for_all_parts(job, event):
    if job.state is JobState.DUMPING and isinstance(event, protocol.Written):
        dump = job.dump
        digests = dict.fromkeys(dump.writers, event.digest)
        job = job._replace(
            dump=dump._replace(
                digests=RankMap({**digests, **dump.digests}), writing=RankSet({event.rank})
            )
        )
    return decide(job, event)


def giving_up_at_the_first_trouble(job, event):
    if isinstance(event, protocol.SaveFailed):
        one = altered_policy(job.policy, places=1)
        decision = decide(job._replace(policy=one), altered(event, is_place=True))
        return decision._replace(job=decision.job._replace(policy=job.policy))
    return decide(job, event)


def asking_again_who_failed(job, event):
    if job.state is JobState.DUMPING:
        job = job._replace(dump=job.dump._replace(failed=RankMap()))
    return decide(job, event)


def not_waiting_for_who_may_go_on(job, event):
    if job.state is JobState.FREEZING and job.dump.behind:
        job = job._replace(dump=job.dump._replace(behind=RankSet()))
    return decide(job, event)


def letting_go_on_twice(job, event):
    decision = decide(job, event)
    if decision.job.state is JobState.FREEZING:
        dump = decision.job.dump._replace(reach=NEVER, behind=RankSet())
        return decision._replace(job=decision.job._replace(dump=dump))
    return decision


BROKEN = [
    (without_finish, "waits for ever"),
    (forgetting_the_request, "after a stop was asked for|what happened is"),
    (believing_old_news, "simulate"),
    (signalling_the_dead, "are not alive"),
    (without_a_budget, "budget"),
    (blaming_the_last, "does not blame"),
    (never_killing, "waits for ever"),
    (forgetting_dumps, "is open or known"),
    (forgetting_what_is_saved, "is forgotten"),
    (changing(do.StartAttempt, resume=None), "but the newest dump is"),
    (changing(do.SaveRanks, place=0), "are full|the other is due"),
    (changing(do.SaveRanks, digesters=()), "but the holders are"),
    (changing(do.CommitDump, odd=()), "but they said"),
    (changing(do.CommitDump, step=1), "without coverage"),
    (changing(do.Finish, reason="rank 0 1 2 3 4"), "does not|while ranks are alive"),
    (without(do.AbandonDump), "is open"),
    (without(protocol.Release), "do not hear|for ever"),
    (without(do.SaveRanks), "simulate"),
    (believing(protocol.Frozen, is_whole=True), "the holders are|the newest step"),
    (believing(protocol.Frozen, step=3), "the newest step|a crash loop|could be saved"),
    (believing(protocol.SaveFailed, is_place=False), "be saved|the holders are|are full"),
    (believing(protocol.Digested, digest="1:0"), "simulate"),
    (believing_answers_to_old_orders, "without coverage"),
    (believing(protocol.Frozen, limit=1_000), "could go on to it"),
    (changing(do.FreezeRanks, step=0), "is open or known"),
    (changing(do.FreezeRanks, step=1_000), "nobody is to be|are behind|others hold"),
    (not_waiting_for_who_may_go_on, "are on their way to it|the holders are"),
    (letting_go_on_twice, "frozen once more|the holders are"),
    (taking_the_oldest_step, "the newest step|a crash loop|could be saved"),
    (not_comparing, "have not said|but they said"),
    (not_waiting_for_all_parts, "without coverage"),
    (giving_up_at_the_first_trouble, "could be saved"),
    (asking_again_who_failed, "the holders are|waits for ever|the end took"),
    (waiting_for_ever(JobState.FREEZING), "waits for ever|frozen for"),
    (waiting_for_ever(JobState.DUMPING), "waits for ever"),
    (waiting_for_ever(JobState.COMMITTING), "waits for ever"),
    (seeing(lambda job: job._replace(stalled=0)), "a crash loop"),
    (seeing(lambda job: job._replace(stalled=9)), "while the budget is left"),
    (seeing(lambda job: attempting(job, raised=RankSet())), "leave with its own code"),
    (seeing(lambda job: attempting(job, is_failure_raised=False)), "does not blame"),
    (believing(ev.CheckpointFound, step=5), "is forgotten"),
    (seeing(lambda job: attempting(job, refusal="")), "what happened is|a crash loop"),
    (without(do.RefuseRanks), "do not hear"),
]


@mutants.cases(BROKEN)
def test_a_broken_controller_is_noticed(mutant, promise):
    mutants.assert_noticed(mutant, promise)
