"""What is said of failures at the end of a job."""

import pytest
from support.histories.plain import rules

from agent.accounting.account import Account
from agent.accounting.summary import percent, summary
from agent.controller.job import Job
from agent.spec.spent_budget import SpentBudget

KNOWN = Account(
    now_s=733.0, started_s=10.0, trained_s=713.9, is_known=True, over=3, lost_s=2.94, lost_steps=0
)


def said(account, **job):
    return summary(account, Job(rules(), **job))


@pytest.mark.parametrize(
    ("account", "job", "words"),
    [
        (KNOWN._replace(over=0), {}, ""),
        (KNOWN, {"replaced_in_all": 3}, "training was 98.7 % of 12 min 3 s: 3 ranks replaced, 0 steps and 2.9 s lost"),
        (KNOWN._replace(lost_steps=1), {"replaced_in_all": 1, "restarts": 2}, "training was 98.7 % of 12 min 3 s: 1 rank replaced, 2 restarts, 1 step and 2.9 s lost"),
        # what was before node 0 was lost is in no time and no loss that is told of
        (KNOWN._replace(before=SpentBudget(2, 2)), {"replaced_in_all": 3, "restarts": 2}, "training was 98.7 % of 12 min 3 s: 3 ranks replaced (2 before that), 2 restarts (2 before that), 0 steps and 2.9 s lost"),
        (KNOWN._replace(lost_steps=None, lost_s=None), {"restarts": 1}, "training was 98.7 % of 12 min 3 s: 1 restart, unknown time lost, and steps that are not saved"),
        (KNOWN._replace(is_known=False), {"restarts": 1}, "1 restart in 12 min 3 s; what was lost is not known without a TrainState in every rank"),
        (KNOWN._replace(is_known=False), {}, ""),  # the failure report says it all
    ],
)  # fmt: skip
def test_one_sentence(account, job, words):
    assert said(account, **job) == words


def test_what_is_not_all_is_never_called_all():
    assert percent(0.99999) == "99.9 %" and percent(1.0) == "100.0 %"
    assert percent(0.0) == "0.0 %" and percent(0.987) == "98.7 %"
    shares = [at / 7919 for at in range(7919)]
    for account in (KNOWN._replace(trained_s=share * KNOWN.wall_s) for share in shares):
        assert percent(account.facts()["share"]) == percent(account.goodput)
