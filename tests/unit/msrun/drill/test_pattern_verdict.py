"""How the ends of the catalogue's scripts are judged, from what was recorded of them."""

from __future__ import annotations

import pytest

from agent.controller import messages
from msrun.drill.pattern_verdict import (
    PatternRun,
    PatternVerdict,
    ScriptResult,
    judge,
    read_accusation,
    read_results,
    read_said,
)
from msrun.trials.history import DrillHistory, RankLife, Strike

EXPECTED = {rank: ScriptResult("41b5", {"best": "0.5"}) for rank in range(2)}
OTHER_WEIGHTS = EXPECTED | {1: ScriptResult("77aa", {"best": "0.5"})}
OTHER_VALUE = EXPECTED | {1: ScriptResult("41b5", {"best": "0.7"})}
WARNED = ("train.py:41 `best` begins anew after a replacement or resume: keep it",)


def run(**changed):
    undisturbed = PatternRun(0, EXPECTED, struck=1, steps_lost=0, said=())
    return undisturbed._replace(**changed)


@pytest.mark.parametrize(
    ("found", "verdict", "why"),
    [
        (run(), PatternVerdict.EQUAL, ""),
        (run(said=WARNED), PatternVerdict.EQUAL, ""),
        (run(struck=0), PatternVerdict.UNSTRUCK, ""),
        # weights
        (run(results=OTHER_WEIGHTS), PatternVerdict.WRONG, "other weights on rank 1"),
        (run(results=OTHER_WEIGHTS, struck=0), PatternVerdict.WRONG, "other weights"),
        (
            run(results=OTHER_WEIGHTS, said=WARNED),
            PatternVerdict.SAID,
            "rank 1 (train.py:41 `best`",
        ),
        (
            run(results=OTHER_WEIGHTS, said=("`best` differs",)),
            PatternVerdict.WRONG,
            "other weights",
        ),
        (run(results=OTHER_WEIGHTS, steps_lost=3), PatternVerdict.WRONG, "other weights"),
        (run(results={0: EXPECTED[0]}), PatternVerdict.WRONG, "no result of rank 1"),
        (run(results={}, exit_code=1), PatternVerdict.LOST, "exit code 1"),
        (run(results=OTHER_WEIGHTS, exit_code=1), PatternVerdict.LOST, "exit code 1"),
        # the script's own values
        (run(results=OTHER_VALUE), PatternVerdict.WRONG, "best=0.7 instead of 0.5 on rank 1"),
        (run(results=OTHER_VALUE, said=("`bestof` is not kept",)), PatternVerdict.WRONG, "best"),
        (run(results=OTHER_VALUE, said=WARNED), PatternVerdict.SAID, "best=0.7 instead of 0.5"),
        # losses
        (run(steps_lost=3), PatternVerdict.LOST, "3 steps lost"),
        (run(steps_lost=3, said=WARNED), PatternVerdict.SAID, "3 steps lost (train.py:41"),
        (run(exit_code=1, reason="it stops"), PatternVerdict.LOST, "exit code 1: it stops"),
        (run(exit_code=1, said=WARNED), PatternVerdict.SAID, "exit code 1 (train.py:41"),
        (run(exit_code=None), PatternVerdict.LOST, "did not end in time"),
        # claims
        (run(accusation="memory corrupts"), PatternVerdict.WRONG, "untrue: memory corrupts"),
        (run(accusation="it does", exit_code=1), PatternVerdict.WRONG, "untrue: it does"),
    ],
)
def test_verdicts(found, verdict, why):
    outcome = judge(EXPECTED, found)
    assert outcome.verdict is verdict
    assert why in outcome.why and bool(why) == bool(outcome.why)


def test_the_last_result_of_each_rank_counts():
    console = """\
[rank 0]: epoch 1 loss 0.5
[rank 1]: FINAL weights=first best=0.1
msrun: rank 1 is back after 0.3 s; training resumes at step 3, no step is lost
[rank 1]: FINAL weights=41b5 best=0.5 seen=3
[rank 0]: FINAL weights=41b5
[rank 0]: not FINAL weights=no
FINAL weights=no
"""
    assert read_results(console) == {
        0: ScriptResult("41b5", {}),
        1: ScriptResult("41b5", {"best": "0.5", "seen": "3"}),
    }


def history(*warnings, struck_at=10.0):
    life = RankLife("a", 0, 0.0, warnings=list(warnings))
    strike = Strike(0, time=0.0, at=struck_at, step=3, attempt=0)
    return DrillHistory({0: (life,)}, {}, strikes=(strike,))


def test_what_is_said_before_the_death_excuses_and_what_follows_does_not():
    console = """\
msrun: half protected: `best` begins anew after a replacement
[rank 0]: the script itself says that this is not protected
msrun: protected: a rank that dies is replaced, no step is lost
msrun: rank 1 was killed by SIGKILL in step 3; replacing it, rank 0 keeps running
msrun: not replaced: step 2 is not saved
"""
    told = history((9.0, "queue cannot be saved"), (9.5, "epoch 2"), (11.0, "nothing is saved"))
    assert read_said(console, told) == (
        "half protected: `best` begins anew after a replacement",
        "queue cannot be saved",
    )
    assert read_said("", history()) == ()


@pytest.mark.parametrize(
    "sentence", [messages._LATE, messages._LATES, messages._RESULT, messages._RESULTS]
)
def test_whatever_msrun_says_of_values_that_differ_by_rank_is_said(sentence):
    told = sentence.format("t.py:4 `mean`", "copy")
    assert read_said(f"msrun: {told}\n", history()) == (told,)


def test_hardware_is_accused_without_a_reason():
    doubt = "msrun: rank 1 differs: the script trains ranks differently, or memory corrupts data"
    assert read_accusation(doubt) == ""
    blame = "msrun: rank 1 differs: memory or a processor corrupts data silently there"
    assert read_accusation(f"{doubt}\n{blame}\n") == blame
