"""Controllers that break a promise: each is the real one with one mistake."""

import pytest

from agent.controller import events as ev
from agent.controller.attempts import Decision
from agent.controller.decide import decide
from support.simulator.kinds import altered, is_order, ordering
from support.simulator.node import simulate
from support.simulator.promises import BrokenPromiseError


def cases(broken):
    """A case for each mutant, with a pattern of what is said of the promise that it breaks."""
    return pytest.mark.parametrize(
        ("mutant", "promise"), broken, ids=lambda each: getattr(each, "__name__", each)
    )


def assert_noticed(mutant, promise, **job):
    """Some schedule shows that the controller is broken; ``job``: as :func:`simulate` takes it."""
    with pytest.raises(BrokenPromiseError, match=promise):
        for seed in range(20_000):
            simulate(seed, mutant, **job)


def changing(kind, **fields):
    """Every action of a kind is ordered otherwise."""

    def mutant(job, event):
        decision = decide(job, event)
        actions = (
            ordering(each, **fields) if is_order(each, kind) else each for each in decision.actions
        )
        return decision._replace(actions=tuple(actions))

    return mutant


def without(kind):
    def mutant(job, event):
        decision = decide(job, event)
        kept = tuple(each for each in decision.actions if not is_order(each, kind))
        return decision._replace(actions=kept)

    return mutant


def believing(kind, **fields):
    """Every event of a kind is taken for another one."""

    def mutant(job, event):
        return decide(job, altered(event, **fields) if isinstance(event, kind) else event)

    return mutant


def attempting(job, **fields):
    """The job with another memory of the present attempt."""
    return job._replace(now=job.now._replace(**fields))


def waiting_for_ever(state):
    def mutant(job, event):
        if isinstance(event, ev.DeadlinePassed) and event.state is state:
            return Decision(job)
        return decide(job, event)

    return mutant


def seeing(changed):
    """Every event is answered as if the job were another one."""

    def mutant(job, event):
        if job.state.is_end:
            return decide(job, event)
        seen = changed(job)
        decision = decide(seen, event)
        return Decision(job) if decision == Decision(seen) else decision

    return mutant
