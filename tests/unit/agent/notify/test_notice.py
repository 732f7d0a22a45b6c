"""What is told of replayed histories: a second passes before each event."""

from __future__ import annotations

import pytest
from support.histories import dumps, exits, fallbacks, plain, replacements, restarts, same
from support.histories.dumps import running, threw
from support.histories.plain import gone
from support.histories.replacements import DIED, JOINING, REPLACED, THREE

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


def told_of(asked, *steps):
    told, job, account = [], Job(asked), Account()
    for now_s, step in enumerate(steps):
        event = step[0] if type(step) is tuple else step
        decision = decide(job, event)
        known, account = account, after(account, job, event, decision, float(now_s), 0.0)
        told += notices(job, event, decision, known, account)
        job = decision.job
    return told


def test_a_killed_rank_is_told_with_its_step_and_its_replacement():
    died, replaced = told_of(THREE, *REPLACED)
    assert (died.event, died.ranks, died.step) == (
        "died",
        (1,),
        1,
    )  # survivors tell of step 5 later
    assert died.reason == replaced.reason == "rank 1 was killed by SIGKILL"
    assert (replaced.event, replaced.ranks, replaced.step) == ("replaced", (1,), 6)
    assert replaced.lost_s == len(REPLACED) - len(DIED)


def test_a_peer_that_lost_a_rank_is_not_told_before_that_rank():
    lost = threw(0, "RuntimeError: Read error [127.0.0.1]:1: Connection reset by peer")
    assert told_of(THREE, *running(3), lost) == []
    (died,) = told_of(THREE, *running(3), lost, gone(1, -9))
    assert (died.event, died.ranks, died.reason) == ("died", (1,), "rank 1 was killed by SIGKILL")
    (own,) = told_of(THREE, *running(3), threw(0))
    assert (own.event, own.ranks) == ("died", (0,)) and "ValueError: bad" in own.reason


def test_a_hang_and_a_second_death_are_told_for_themselves():
    hung = ev.RankHung(1, 0, "made no progress for 7.5 s (stopped)", 7.5)
    (one,) = told_of(THREE, *running(3), hung)
    assert (one.event, one.ranks) == ("hung", (1,))
    first, second = told_of(THREE, *JOINING, gone(0, -11, 1))
    assert (first.ranks, second.event, second.ranks) == ((1,), "died", (0,))
