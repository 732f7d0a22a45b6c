"""A marathon's faults are decided by its seed, its answers read from events, its verdict by rules."""

import json
from collections import Counter
from itertools import chain

import pytest

from msrun.drill import table
from msrun.drill.marathon_verdict import (
    MarathonAnswer,
    MarathonEnd,
    MarathonExit,
    MarathonStrike,
    ProcessGrowth,
    ProcessUse,
    judge_marathon,
    largest_growths,
    read_answers,
)
from msrun.drill.random_faults import (
    GAP,
    MARATHON_KINDS,
    PAIR_S,
    MarathonFault,
    draw_marathon,
)
from msrun.trials.history import DrillHistory, FinalState, RankLife
from worker_hooks.drill.plan import Moment

RANKS = 4
MANY = tuple(draw_marathon(5000, 1, RANKS))
PAIRS = [faults for faults in MANY if len(faults) > 1]


def lost(fault):
    return set(fault.ranks) if MARATHON_KINDS[fault.kind].loses_rank else set()


def test_a_seed_decides_every_fault():
    assert tuple(draw_marathon(50, 7, RANKS)) == tuple(draw_marathon(50, 7, RANKS))
    assert tuple(draw_marathon(50, 7, RANKS)) != tuple(draw_marathon(50, 8, RANKS))


@pytest.mark.parametrize("number", [1, 2, 3, 17])
def test_a_pair_counts_as_two(number):
    for seed in range(20):
        assert sum(map(len, draw_marathon(number, seed, RANKS))) == number


def test_every_kind_is_drawn_as_often_as_it_weighs_and_some_in_pairs():
    drawn = Counter(fault.kind for fault in chain.from_iterable(MANY))
    assert drawn.keys() == MARATHON_KINDS.keys()
    assert drawn["rank"] > 5 * drawn["held"]
    assert 800 < len(PAIRS) < 1200
    assert all(0 <= second.after_s <= PAIR_S and second.gap == 0 for _, second in PAIRS)
    gaps = [faults[0].gap for faults in MANY]
    assert min(gaps) == 1 and GAP - 0.5 < sum(gaps) / len(gaps) < GAP + 0.5


def test_nothing_is_drawn_that_msrun_does_not_promise_to_survive():
    for fault in chain.from_iterable(MANY):
        assert len(lost(fault)) < RANKS
        assert len(fault.ranks) == len(set(fault.ranks))
        assert fault.kind != "held" or fault.moment in {Moment.FORWARD, Moment.BACKWARD}
    for first, second in PAIRS:
        assert len(lost(first) | lost(second)) < RANKS, "nobody keeps the state"
        kinds = [first.kind, second.kind]
        assert first.kind != "msrun", "nothing is left to strike"
        assert second.kind != "msrun" or not lost(first)
        assert sum(MARATHON_KINDS[kind].ends_msrun for kind in kinds) < 2
        assert second.kind != "stopped" or not lost(first) & lost(second), "it may not be watched"
        assert second.kind != "held" or not lost(first), "in the first step it is not found"


def test_a_job_of_one_rank_has_faults_too_but_keeps_its_rank():
    found = list(chain.from_iterable(draw_marathon(300, 3, 1)))
    assert {fault.kind for fault in found} == {
        *("paused", "forkserver", "forkserver_stopped", "store"),
        *("msrun", "msrun_paused", "graceful"),
    }
    assert "several" in {fault.kind for fault in chain.from_iterable(draw_marathon(300, 3, 2))}


def strike(at, *faults, step=5, took_s=1.0, missed=()):
    struck = faults or (MarathonFault("rank", (1,)),)
    return MarathonStrike(tuple(struck), 1000.0 + at, float(at), step, took_s, missed)


def event(at, name, **fields):
    return {"time": 1000.0 + at, "event": name, **fields}


def test_what_happens_until_the_next_strike_answers_this_one():
    strikes = [strike(10), strike(20, MarathonFault("msrun")), strike(30)]
    told = read_answers(
        strikes,
        [
            event(1, "StartAttempt", attempt=0, reason="the job begins"),
            event(11, "ReplaceRanks", newcomers=[1], reason="rank 1 was killed"),
            event(12, "ReplaceRanks", newcomers=[1, 2], reason="rank 2 was killed"),
            event(22, "StartAttempt", attempt=0, reason="resumed"),
            event(31, "StartAttempt", attempt=3, reason="not replaced: rank 1 exited already"),
        ],
        [MarathonExit(1021.0, -9)],
        [(12.5, 2)],
    )
    assert told == (
        MarathonAnswer(replaced=(1, 1, 2), lost=2),
        MarathonAnswer(exits=(MarathonExit(1021.0, -9),)),
        MarathonAnswer(restarts=("not replaced: rank 1 exited already",)),
    )
    assert read_answers([], [event(1, "ReplaceRanks", newcomers=[1])]) == ()


def history(*, digest="same", loss="0x1p0", first=3):
    """Two ranks; the second life begins anew with step ``first``."""
    lives = {
        rank: (
            RankLife("run", 0, 1.0, {1: ["0x0"], 2: ["0x0"]}, {1: 2.0, 2: 3.0}),
            RankLife("run", 1, 15.0, {3: [loss]}, dict.fromkeys(range(first, 4), 16.0)),
        )
        for rank in range(2)
    }
    return DrillHistory(lives, {rank: FinalState(3, digest, "own") for rank in range(2)})


SMALL = ProcessUse(30, 3, 30.0)


def judged(told=None, *, strikes=None, exits=(), growths=(), end=None, events=()):
    told = told or history()
    told = DrillHistory(told.lives, told.finals, events=tuple(events))
    return judge_marathon(
        seed=4,
        wanted=2,
        strikes=strikes or [strike(10)],
        exits=exits,
        growths=growths,
        end=end or MarathonEnd(0),
        reference=history(),
        history=told,
    )


def test_an_equal_end_keeps_every_promise():
    found = judged()
    assert (found.is_equal, found.broken, found.struck, found.steps) == (True, (), 1, 5)
    assert judged(strikes=[strike(10, missed=(0,))]).struck == 0


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (history(digest="other"), "weights differ on rank 0"),
        (history(loss="0x2p0"), "the loss of rank 1 differs at step 3"),
    ],
)
def test_another_bit_is_named_with_its_rank_and_step(told, words):
    found = judged(told)
    assert not found.is_equal
    assert words in found.broken


def test_steps_that_are_trained_again_are_lost():
    found = judged(history(first=2))
    assert found.is_equal
    assert found.broken == ("1 step lost",)
    assert found.answers[0].lost == 1
    both = strike(10, MarathonFault("several", (0, 1)))
    assert judged(history(first=2), strikes=[both]).broken == (), "nobody lives on who has step 2"


def test_a_restart_is_explained_by_its_reason_or_breaks_the_promise():
    told = [event(11, "StartAttempt", attempt=1, reason="restart 1: rank 1 was killed")]
    assert judged(events=told).broken == ()
    found = judged(events=[event(11, "StartAttempt", attempt=1, reason="")])
    assert found.broken == ("a restart without a reason at step 5 (rank killed: 1)",)


def test_only_a_fault_of_msrun_itself_may_end_it():
    by_us = strike(10, MarathonFault("msrun"), MarathonFault("store", after_s=0.1))
    went = MarathonExit(1011.0, -9)
    assert judged(strikes=[by_us], exits=[went]).broken == ()
    again = MarathonExit(1012.0, 1, "three attempts in a row")
    (why,) = judged(strikes=[by_us], exits=[went, again]).broken
    assert why.startswith("msrun ended with exit code 1 at step 5 (msrun killed, store host")
    assert why.endswith("100 ms later): three attempts in a row")
    assert judged(exits=[went]).broken == (
        "msrun ended with exit code -9 at step 5 (rank killed: 1): no reason is recorded",
    )


def test_a_hang_breaks_the_promise_although_the_job_was_stopped_and_resumed():
    stuck = strike(10)._replace(hangs=1)
    (why,) = judged(strikes=[stuck], exits=[MarathonExit(1100.0, 143)]).broken
    assert why == "the job hung at step 5 (rank killed: 1), was stopped, and resumed"


def test_what_grows_from_fault_to_fault_leaks():
    steady = ProcessGrowth("rank", 90, SMALL, SMALL._replace(files=31, mb=50.0))
    leaking = ProcessGrowth("msrun", 80, SMALL, SMALL._replace(files=130))
    swollen = ProcessGrowth("rank", 20, SMALL, ProcessUse(30, 20, 230.0))
    found = judged(growths=[steady, leaking, swollen])
    assert found.broken == (
        "msrun has 100 more descriptors after 80 faults",
        "rank has 17 more threads, 200 more MB after 20 faults",
    )
    younger = steady._replace(looks=10)
    assert largest_growths([younger, steady, leaking, swollen]) == (steady, leaking, swollen)


def test_what_is_left_and_an_end_that_is_none_break_the_promise():
    assert judged(end=MarathonEnd(1)).broken == ("the job ended with exit code 1",)
    stuck = judged(end=MarathonEnd(None, "the job has not trained for 240 s"))
    assert (stuck.is_equal, stuck.broken) == (False, ("the job has not trained for 240 s",))
    wrong = judged(history(loss="0x2p0"), end=MarathonEnd(None, "stuck"))
    assert wrong.broken == ("stuck", *(f"the loss of rank {n} differs at step 3" for n in (0, 1)))
    left = MarathonEnd(0, left=2, zombies=1, left_files=("step_4_tmp",))
    assert judged(end=left).broken == (
        "2 processes outlived the job",
        "1 zombie of msrun",
        "files are left: step_4_tmp",
    )


def test_the_result_is_a_row_for_each_kind_and_one_for_pairs(capfd):
    pair = strike(10, MarathonFault("msrun"), MarathonFault("store", after_s=0.1))
    found = judged(
        strikes=[strike(2, took_s=0.5), pair],
        exits=[MarathonExit(1011.0, -9)],
        growths=[ProcessGrowth("msrun", 9, SMALL, SMALL)],
        events=[
            event(3, "ReplaceRanks", newcomers=[1]),
            event(12, "StartAttempt", attempt=1, reason="nobody was left"),
        ],
    )
    table.show_marathon(found, as_json=False)
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert lines == [
        "fault times replaced restarted resumed longest steps lost",
        "rank killed 1 1 0 0 500 ms 0",
        "two at once 1 0 1 1 1 s 0",
        "restart at step 5, msrun killed, store host killed 100 ms later: nobody was left",
        "msrun, 9 faults old: 30 descriptors, 3 threads, 30 MB, then 30 descriptors, 3 threads, 30 MB",
        "0 log files, 0.0 MB",
        "seed 4: 3 faults in 5 steps, 0 s: bitwise equal, every promise kept",
    ]
    table.show_marathon(found, as_json=True)
    told = json.loads(capfd.readouterr().out)
    assert (told["ok"], told["equal"], told["struck"], told["broken"]) == (True, True, 3, [])
    assert told["strikes"][1]["restarts"] == ["nobody was left"]
    assert told["strikes"][1]["exits"][0]["exit_code"] == -9
