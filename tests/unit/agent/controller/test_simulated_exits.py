"""Controllers that break a promise about graceful exits: random schedules notice each of them."""

from dataclasses import replace

from support.simulator import mutants
from support.simulator.kinds import altered, is_order, ordering
from support.simulator.mutants import attempting, changing, waiting_for_ever, without

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.attempts import Decision
from agent.controller.decide import decide
from agent.controller.states import JobState
from agent.ranks.rank_set import RankSet
from worker_hooks.contract import protocol


def counting(job, signals):
    return job._replace(stop=job.stop._replace(signals=signals))


def agreeing_on_the_first_step(job, event):
    decision = decide(job, event)
    standing = {} if decision.job.now.exit is None else decision.job.now.exit.standing
    actions = (
        ordering(each, step=min(standing.values())) if is_order(each, protocol.Proceed) else each
        for each in decision.actions
    )
    return decision._replace(actions=tuple(actions))


def taking_one_answer_for_all(job, event):
    if isinstance(event, protocol.Standing) and job.state is JobState.HOLDING:
        standing = dict.fromkeys(job.ranks, event.step)
        job = job.with_exit(job.now.exit._replace(standing=standing))
    return decide(job, event)


def taking_one_arrival_for_all(job, event):
    if isinstance(event, protocol.Frozen) and job.state is JobState.HOLDING:
        answers = {rank: altered(event, rank=rank) for rank in job.ranks}
        job = job._replace(dump=job.dump._replace(answers=answers))
    return decide(job, event)


def letting_leave_whatever_happened(job, event):
    if job.state is JobState.COMMITTING and job.now.exit is not None:
        job = job.with_exit(job.now.exit._replace(is_held=True, step=job.dump.step))
    return decide(job, event)


def overlooking_deaths(job, event):
    if isinstance(event, ev.WorkerExited) and job.state is JobState.HOLDING:
        event = altered(event, exit_code=0)
    return decide(job, event)


def overlooking_exceptions(job, event):
    if isinstance(event, protocol.Raised) and job.state is JobState.HOLDING:
        return Decision(job)
    return decide(job, event)


def deaf_to_the_second_request(job, event):
    if isinstance(event, ev.StopRequested) and job.state is JobState.HOLDING:
        return Decision(counting(job, job.stop.signals + 1))
    return decide(job, event)


def killing_at_the_second_request(job, event):
    if isinstance(event, ev.StopRequested) and job.stop.signals == 1:
        event = altered(event, is_now=True)
    return decide(job, event)


def deaf_to_the_third_request(job, event):
    if isinstance(event, ev.StopRequested) and job.now.exit is not None:
        job = counting(job, min(job.stop.signals, 1))
    return decide(job, event)


def taking_ranks_for_people(job, event):
    if (
        isinstance(event, ev.ExitRequestedByFile | protocol.ExitRequested)
        and event.attempt == job.attempt
        and job.stop.why
    ):
        event = ev.StopRequested(15)
    return decide(job, event)


def forwarding_the_signal(job, event):
    if isinstance(event, ev.StopRequested) and job.state is JobState.RUNNING:
        return decide(attempting(job, unreachable=RankSet(job.ranks)), event)
    return decide(job, event)


def holding_only_some(job, event):
    if isinstance(event, ev.StopRequested) and job.state is JobState.RUNNING:
        decision = decide(job, event)
        actions = (
            replace(each, ranks=each.ranks[:1]) if isinstance(each, do.HoldRanks) else each
            for each in decision.actions
        )
        return decision._replace(actions=tuple(actions))
    return decide(job, event)


def saving_nothing(job, event):
    if isinstance(event, protocol.Frozen) and job.state is JobState.HOLDING:
        decision = decide(job._replace(saved_step=10**6), event)
        return decision._replace(job=decision.job._replace(saved_step=job.saved_step))
    return decide(job, event)


def signalling_those_who_leave(job, event):
    decision = decide(job, event)
    more = [
        do.SignalRanks(each.ranks, 15, each.reason)
        for each in decision.actions
        if is_order(each, protocol.Leave)
    ]
    return decision._replace(actions=(*decision.actions, *more))


def in_a_hurry(job, event):
    decision = decide(job, event)
    actions = (
        replace(each, after_s=0.0)
        if isinstance(each, do.SetDeadline) and each.state in {JobState.HOLDING, JobState.STOPPING}
        else each
        for each in decision.actions
    )
    return decision._replace(actions=tuple(actions))


def starting_again(job, event):
    decision = decide(job, event)
    return decision._replace(
        job=counting(decision.job._replace(stop=decision.job.stop._replace(why="")), 0)
    )


BROKEN = [
    (agreeing_on_the_first_step, "the last step begun is"),
    (changing(protocol.Proceed, step=10_000), "the last step begun is"),
    (taking_one_answer_for_all, "but they said|are told nothing"),
    (taking_one_arrival_for_all, "not all ranks stay|the holders are|nothing follows"),
    (letting_leave_whatever_happened, "there was no agreement"),
    (overlooking_deaths, "what happened is|there was no agreement|does not blame"),
    (overlooking_exceptions, "is held|simulate"),
    (deaf_to_the_second_request, "the second request changes nothing|held for"),
    (killing_at_the_second_request, "s of grace|could be saved|middle of its commit"),
    (deaf_to_the_third_request, "is not heard|after the end"),
    (taking_ranks_for_people, "s of grace|not all ranks stay|dismissed False"),
    (forwarding_the_signal, "instead of"),
    (holding_only_some, "are alive"),
    (saving_nothing, "is not saved yet"),
    (signalling_those_who_leave, "told to leave"),
    (in_a_hurry, "held for|s of grace"),
    (starting_again, "after a stop was asked for|what happened is|is not heard"),
    (without(do.HoldRanks), "simulate"),
    (without(protocol.Proceed), "simulate"),
    (without(protocol.Leave), "do not hear"),
    (without(protocol.Dismiss), "dismissed False"),
    (changing(do.Finish, exit_code=0), "what happened is"),
    (waiting_for_ever(JobState.HOLDING), "waits for ever|held for"),
]  # fmt: skip


@mutants.cases(BROKEN)
def test_a_broken_controller_is_noticed(mutant, promise):
    mutants.assert_noticed(mutant, promise)
