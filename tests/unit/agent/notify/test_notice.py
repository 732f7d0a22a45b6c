"""What is told of replayed histories: a second passes before each event."""

from __future__ import annotations

import pytest
from support.histories import dumps, exits, fallbacks, plain, replacements, restarts, same

from agent.accounting.account import Account
from agent.accounting.ledger import after
from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.notify.notice import notices

HISTORIES = [
    pytest.param(asked, steps, id=f"{module.__name__.rpartition('.')[2]}: {name}")
    for module in (dumps, exits, fallbacks, plain, replacements, restarts, same)
    for name, asked, steps in module.HISTORIES
]


@pytest.mark.parametrize(("asked", "steps"), HISTORIES)
def test_each_thing_is_told_once(asked, steps):
    job, account, told, wanted, saved = Job(asked), Account(), [], [], 0
    for now_s, step in enumerate(steps):
        event = step[0] if type(step) is tuple else step
        decision = decide(job, event)
        known, account = account, after(account, job, event, decision, float(now_s), float(now_s))
        told += notices(job, event, decision, known, account)
        for action in decision.actions:
            wanted += ["ended"] * isinstance(action, do.Finish)
            wanted += ["restarted"] * (isinstance(action, do.StartAttempt) and action.attempt > 0)
        is_kept = isinstance(event, ev.DumpCommitted) and decision.job.resume != job.resume
        saved += is_kept
        job = decision.job
    names = [notice.event for notice in told]
    assert [name for name in names if name in {"ended", "restarted"}] == wanted
    assert names.count("saved") == saved
    answers = [incident.answer.value for incident in account.recent]
    assert account.over > len(answers) or names.count("replaced") == answers.count("replaced")
    first = [name for name in names if name in {"died", "hung", "failed"}]
    assert len(first) >= account.incidents and bool(first) == bool(account.incidents)
    assert all("\n" not in notice.reason or notice.event == "ended" for notice in told)


def test_a_killed_rank_is_told_with_its_step_and_its_replacement():
    told, job, account = [], None, Account()
    rows = {name: (asked, steps) for name, asked, steps in replacements.HISTORIES}
    for asked, steps in rows.values():
        job, account = Job(asked), Account()
        for now_s, step in enumerate(steps):
            event = step[0] if type(step) is tuple else step
            decision = decide(job, event)
            known, account = account, after(account, job, event, decision, float(now_s), 0.0)
            told += notices(job, event, decision, known, account)
            job = decision.job
    replaced = [notice for notice in told if notice.event == "replaced"]
    assert replaced
    assert all(each.ranks and each.lost_s is not None and each.step for each in replaced)
    assert any("was killed by SIGKILL" in notice.reason for notice in told)
