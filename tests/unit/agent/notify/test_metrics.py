"""The figures of a job: types, labels, and nothing for what is not known."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.histories import dumps, exits, fallbacks, plain, replacements, restarts, same
from support.histories.dumps import running
from support.histories.plain import rules
from support.histories.replacements import THREE

from agent.accounting.account import Account
from agent.accounting.ledger import after
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.controller.states import RankState
from agent.notify.metrics import families
from agent.workers.tempo import Tempo
from agent.workers.worker import Worker


def told(account=None, run_id="a", workers=()):
    facts = SimpleNamespace(spec=SimpleNamespace(run_id=run_id), started=7.5, log=Path("x"))
    job = Job(rules(), replaced_in_all=2, restarts=1)
    found = families(facts, job, workers, account or Account(), 3, 9.5)
    assert len({family.name for family in found}) == len(found)
    samples = {}
    for family in found:
        assert family.kind in {"gauge", "counter"}
        for labels, value in family.samples:
            (run, *others) = labels.items()
            assert run == ("run_id", run_id)
            samples["".join([family.name, *(f",{key}={each}" for key, each in others)])] = value
    return samples


def test_what_is_known_is_told():
    worker = Worker(1, 1, 0)
    worker.beat = SimpleNamespace(step=41)
    worker.tempo = Tempo(9, 41, 0.25, 0.5, 0.1, 0.2)
    worker.state = RankState.RUNNING
    account = Account(now_s=20.0, started_s=10.0, trained_s=7.5, is_known=True, over=2, lost_s=1.5)
    found = told(account, workers=[worker])
    assert found["step"] == 41
    assert found["step_duration_seconds,rank=1"] == 0.25
    assert found["ranks,state=running"] == 1
    assert sum(found[name] for name in found if name.startswith("job_state")) == 1
    totals = ("replacements", "restarts", "hung_ranks", "incidents", "lost_seconds", "lost_steps")
    assert [found[name] for name in totals] == [2, 1, 3, 2, 1.5, 0]
    assert (found["goodput_ratio"], found["training_seconds"]) == (0.75, 7.5)
    assert found["start_time_seconds"] == 7.5
    assert found["last_update_time_seconds"] == 9.5


def test_what_is_not_known_has_no_sample():
    found = told(Account(lost_s=None, lost_steps=None))
    absent = {"step", "goodput_ratio", "training_seconds", "lost_seconds", "lost_steps"}
    assert absent & found.keys() == set()


def counters(found):
    return {each.name: each.samples[0][1] for each in found if each.kind == "counter"}


HUNG = ev.RankHung(1, 0, "made no progress for 7.5 s (stopped)", 7.5)
HISTORIES = [
    pytest.param(asked, steps, id=f"{module.__name__.rpartition('.')[2]}: {name}")
    for module in (dumps, exits, fallbacks, plain, replacements, restarts, same)
    for name, asked, steps in module.HISTORIES
]


@pytest.mark.parametrize(
    ("asked", "steps"), [*HISTORIES, pytest.param(THREE, [*running(3), HUNG], id="a hang")]
)
def test_counters_only_grow(asked, steps):
    facts = SimpleNamespace(spec=SimpleNamespace(run_id="a"), started=7.5)
    job, account, known = Job(asked), Account(), {}
    for second, step in enumerate(steps):
        event, now_s = step[0] if type(step) is tuple else step, 10.0 * second
        decision = decide(job, event)
        then = account._replace(now_s=now_s)  # scraped just before
        job, account = decision.job, after(account, job, event, decision, now_s, now_s)
        for each in (then, account):
            found = counters(families(facts, job, (), each, 0, now_s))
            assert {name for name in found if found[name] < known.get(name, 0.0)} == set()
            known |= found
