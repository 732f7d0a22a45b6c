"""Who holds the same, and what follows if ranks do not: histories and single cases."""

import pytest
from support.histories.replacements import THREE, play
from support.histories.same import EQUAL, HISTORIES, KEPT, OTHER, OWN, says

from agent.controller.decide import decide
from agent.controller.events import fields


@pytest.mark.parametrize(
    ("rules_", "steps"), [row[1:] for row in HISTORIES], ids=[row[0] for row in HISTORIES]
)
def test_history(rules_, steps):
    play(rules_, steps)


def test_what_is_not_protected_is_said_once_and_at_once():
    job = play(THREE, OWN[:-1])
    decision = decide(job, OWN[-1][0])
    assert decision.say.startswith("not protected: model.w differs: rank 2 against rank 0 against")
    assert "no other rank holds what rank 2 has" in decision.say
    assert decide(decision.job, says(0, 2, {"model.w": "x"})).say == ""


def test_equal_ranks_need_no_word():
    job = play(THREE, EQUAL[:-1])
    decision = decide(job, EQUAL[-1][0])
    assert (decision.say, decision.actions) == ("", ())
    assert decision.job.since_restart.comparison.compared == 1
    assert not decision.job.since_restart.comparison.reports


def test_an_undone_replacement_is_said_with_both_values():
    job = decide(play(THREE, KEPT), says(2, 6, None, 1)).job
    decision = decide(job, says(1, 6, OTHER, 1))
    assert "optimizer.lr differs: 0.2 on rank 1, 0.1 on rank 2" in decision.say
    assert "no rank is replaced any more" in decision.say


def test_a_large_report_is_short_in_the_journal():
    told = fields(says(0, 1))
    assert told["texts"]["parts"] == "2"
    assert told["texts"] != fields(says(0, 1, OTHER))["texts"]
