"""Controllers that break a promise about replacements: random schedules notice each of them."""

from support.policies import altered_policy
from support.simulator import mutants
from support.simulator.kinds import altered
from support.simulator.mutants import attempting, changing, seeing, waiting_for_ever, without

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller import replacement
from agent.controller.attempts import Decision
from agent.controller.decide import decide
from agent.controller.states import JobState
from agent.ranks.rank_map import RankMap
from agent.ranks.rank_set import RankSet
from worker_hooks.contract import protocol


def under_way(job, **changes):
    """The job whose replacement is known otherwise; any other job as it is."""
    if job.since_restart.replacement is None:
        return job
    return job.with_replacement(job.present_replacement()._replace(**changes))


def never_replacing(job, event):
    off = altered_policy(job.policy, is_on=False)
    decision = decide(job._replace(policy=off), event)
    return decision._replace(job=decision.job._replace(policy=job.policy))


def replacing_whoever_can_not(job, event):
    if isinstance(event, protocol.Registered):
        event = altered(event, not_replaceable_why="")
    return decide(job, event)


def not_waiting_for_those_that_go(job, event):
    decision = decide(job, event)
    job, now = decision.job, decision.job.since_restart.replacement
    if job.state is JobState.REPLACING and now.going and len(now.going) < len(job.alive()):
        turn = replacement.launch(job)
        told = (each for each in decision.actions if not isinstance(each, do.SetDeadline))
        return Decision(turn.job, (*told, *turn.actions))
    return decision


def waiting_for_one_only(job, event):
    if isinstance(event, protocol.Registered) and job.since_restart.replacement is not None:
        job = under_way(job, joined=RankSet(job.ranks) - {event.rank})
    return decide(job, event)


def keeping_newcomers_that_have_not_joined(job, event):
    if isinstance(event, ev.WorkerExited) and job.since_restart.replacement is not None:
        job = under_way(job, joined=RankSet(job.ranks))
    return decide(job, event)


def unpaid(job):
    return job._replace(replaced=0)


def deathless(job):
    return job._replace(deaths=RankMap())


def without_who_raised_first(job):
    return attempting(job, first_raised=None)


def blind_to_exceptions(job, event):
    if isinstance(event, protocol.Raised) and job.state is JobState.REPLACING:
        return Decision(job)
    return decide(job, event)


def blind_to_deaths(job, event):
    if isinstance(event, ev.WorkerExited) and job.state is JobState.REPLACING:
        return Decision(job)
    return decide(job, event)


def falling_at_every_death(job, event):
    if isinstance(event, ev.WorkerExited) and job.state is JobState.REPLACING:
        none = altered_policy(job.policy, max_replacements=0)
        decision = decide(job._replace(policy=none), event)
        return decision._replace(job=decision.job._replace(policy=job.policy))
    return decide(job, event)


def deaf_to_requests(job, event):
    if isinstance(event, ev.StopRequested) and job.state is JobState.REPLACING:
        return Decision(job.requested("it is asked"))
    return decide(job, event)


def believing_it_is_back(job, event):
    if isinstance(event, protocol.Registered) and job.memory is not None:
        event = altered(event, step=job.memory.step)
    return decide(job, event)


def taking_an_answer_of_the_last_round(job, event):
    if isinstance(event, protocol.Registered | ev.WorkerExited | protocol.Raised):
        event = altered(event, attempt=job.attempt)
    return decide(job, event)


def forgetting_too_soon(job, event):
    decision = decide(job, event)
    more = [
        do.ForgetMemory(each.reason)
        for each in decision.actions
        if isinstance(each, do.ReplaceRanks)
    ]
    return decision._replace(actions=(*decision.actions, *more))


def saving_what_is_in_memory_as_if_on_disk(job, event):
    decision = decide(job, event)
    if isinstance(event, ev.DumpCommitted) and decision.job.state is JobState.REPLACING:
        memory = decision.job.memory
        job = decision.job._replace(resume=memory.path, saved_step=memory.step)
        return decision._replace(job=job)
    return decision


def killing_a_survivor(job, event):
    decision = decide(job, event)
    if isinstance(event, protocol.Rejoining) and decision.job != job:
        kill = do.SignalRanks((event.rank,), 9, "why not")
        return decision._replace(actions=(*decision.actions, kill))
    return decision


BROKEN = [
    (never_replacing, "the other is due"),
    (replacing_whoever_can_not, "the other is due"),
    (not_waiting_for_those_that_go, "may live|are alive"),
    (waiting_for_one_only, "have not joined"),
    (keeping_newcomers_that_have_not_joined, "are alive|nothing follows|can be replaced"),
    (seeing(unpaid), "the other is due|budget of replacements|can be replaced"),
    (seeing(deathless), "the other is due|died|can be replaced"),
    (seeing(without_who_raised_first), "the other is due"),
    (blind_to_exceptions, "have not joined|its own code|waits for ever"),
    (blind_to_deaths, "nothing follows|simulate"),
    (falling_at_every_death, "can be replaced"),
    (deaf_to_requests, "after a stop was asked for|is not heard|simulate"),
    (believing_it_is_back, "came back elsewhere"),
    (taking_an_answer_of_the_last_round, "of another attempt"),
    (forgetting_too_soon, "while JobState.REPLACING"),
    (saving_what_is_in_memory_as_if_on_disk, "but the newest dump is|is not what|simulate"),
    (killing_a_survivor, "while JobState.REPLACING|are not alive"),
    (changing(do.PrepareRanks, attempt=1), "than the next"),
    (changing(do.PrepareRanks, ranks=(0, 1)), "are dead"),
    (changing(do.ReplaceRanks, step=1), "not what is in memory"),
    (changing(do.ReplaceRanks, survivors=()), "are alive"),
    (changing(do.CommitDump, from_memory=False), "simulate"),
    (without(do.ReplaceRanks), "simulate"),
    (without(do.RemindReplaced), "the budget of replacements"),
    (without(protocol.GoOn), "waits for ever|simulate"),
    (without(do.ForgetMemory), "while the memory is kept"),
    (waiting_for_ever(JobState.REPLACING), "waits for ever"),
]


@mutants.cases(BROKEN)
def test_a_broken_controller_is_noticed(mutant, promise):
    mutants.assert_noticed(mutant, promise)
