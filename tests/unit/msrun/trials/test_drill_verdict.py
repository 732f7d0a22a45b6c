"""How a drill begins, how a recorded history is judged, and what is shown of it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from agent.spec.job_spec import UsageError
from msrun.drill import session, table
from msrun.drill.fault_options import read_words
from msrun.options.argv import scan
from msrun.trials import history as drill_history
from msrun.trials.exit_verdict import steps_lost
from msrun.trials.history import DrillExit, DrillHistory, FinalState, RankLife, SavedStep, Strike
from msrun.trials.node_fault import NodeDeed, NodeFault
from msrun.trials.trial import Command
from msrun.trials.verdict import check_reference, judge
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.layout import DrillLayout
from worker_hooks.drill import trace
from worker_hooks.drill.plan import Deed, DrillPlan, Fault, Moment
from worker_hooks.drill.trace import TrainingTrace


def test_the_jobs_own_words_are_kept_and_what_is_added_wins():
    line = "--worker_num 4 -v --log_dir mine --rdzv-conf a=b -- train.py --log-dir x -- y"
    argv = Command.of(scan(line.split())).argv(["--log_dir=ours"])
    again = scan(argv[3:])
    assert argv[1:3] == ["-m", "msrun"]
    assert again.script == "train.py" and again.script_args == ("--log-dir", "x", "--", "y")
    said = {dest: setting.text for dest, setting in again.given.items()}
    assert said == {"worker_num": "4", "verbose": "1", "log_dir": "ours", "rdzv_conf": "a=b"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--worker_num=2", "t.py"], "no fault is given"),
        (["--worker_num=2", "--dry_run", "t.py"], "dry run"),
        (["--worker_num=3", "t.py"], "ranks are 0 to 2"),
        (["--worker_num=4"], "no script was given"),
        (["--worker_nam=4", "t.py"], "unrecognized option"),
    ],
)
def test_a_job_that_cannot_be_drilled_is_refused_before_anything_starts(
    tmp_path, monkeypatch, words, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    asked = () if "no fault" in sentence else (read_words("rank=3,step=1", "kill"),)
    with pytest.raises(UsageError) as raised:
        session.drill(asked, session.DrillOptions(tuple(words)), {})
    assert sentence in str(raised.value)


# --- judging ------------------------------------------------------------------------------------

STEPS, RANKS = 6, 2


def losses(rank, first, last):
    return {step: [float(rank + step).hex(), float(step).hex()] for step in range(first, last + 1)}


def life(rank, first, last, *, attempt=0, run="a", begun=0.0):
    """A rank that trained these steps, one a second."""
    return RankLife(
        run,
        attempt,
        begun,
        losses(rank, first, last),
        {step: begun + step for step in range(first, last + 1)},
    )


def finals(**changed):
    told = {rank: FinalState(STEPS, "weights", f"private {rank}") for rank in range(RANKS)}
    return told | {int(name[1:]): final for name, final in changed.items()}


REFERENCE = DrillHistory({rank: (life(rank, 1, STEPS),) for rank in range(RANKS)}, finals())
KILL = Fault(1, 4, Moment.BACKWARD)
EVENTS = (
    {"time": 99.0, "event": "WorkerExited", "rank": 1, "exit_code": 0},  # before the strike
    {"time": 104.003, "event": "WorkerExited", "rank": 1, "exit_code": -9},
    {"time": 104.004, "event": "FreezeRanks", "dump_id": 1, "ranks": [0]},
    {"time": 104.010, "event": "Frozen", "dump_id": 1, "rank": 0, "step": 3},
    {"time": 104.011, "event": "SaveRanks", "dump_id": 1, "step": 3},
    {"time": 104.051, "event": "DumpCommitted", "dump_id": 1, "path": "p"},
    {"time": 104.061, "event": "StartAttempt", "attempt": 1, "resume": "p"},
)
STRIKE = Strike(0, 104.0, 3.5, 4, 0)


def killed(resumed_at=4, **changes):
    """Rank 1 died in step 4; the job went on at ``resumed_at``."""
    fields = {
        "lives": {
            rank: (life(rank, 1, 3), life(rank, resumed_at, STEPS, attempt=1, begun=10.0))
            for rank in range(RANKS)
        },
        "finals": finals(),
        "strikes": (STRIKE,),
        "events": EVENTS,
        "dumps": (SavedStep(50.0, 1, 9), SavedStep(104.05, 3, 2_000_000)),
    }
    return DrillHistory(**(fields | changes))


def judged(history, faults=(KILL,), exit_code=0, **more):
    return judge(faults, REFERENCE, history, exit_code=exit_code, **more)


def test_a_drill_that_lost_nothing_has_its_times():
    outcome = judged(killed(), took_s=7.0)
    assert outcome.broken == () and outcome.verdict == "nothing lost"
    assert outcome.weights_equal
    assert (outcome.step_saved, outcome.steps_lost, outcome.dump_bytes) == (3, 0, 2_000_000)
    times = (outcome.noticed_s, outcome.frozen_s, outcome.dump_s, outcome.training_s)
    assert times == pytest.approx((0.003, 0.010, 0.040, 10.5))  # step 4 at 14.0, struck at 3.5


TIMED = Fault(0, 4, Moment.ANY)
ORDER = {"time": 104.0035, "event": "SignalRanks", "ranks": [0], "signum": 9, "reason": ""}
TIMED_AT = Strike(1, 104.2, 3.7, 4, 0)


def test_a_kill_by_msrun_does_not_count_as_that_of_a_timer():
    """A timer's mark is written when it starts: by its time msrun has killed the rank itself."""
    history = killed(strikes=(STRIKE, TIMED_AT), events=(*EVENTS[:2], ORDER, *EVENTS[2:]))
    outcome = judged(history, (KILL, TIMED))
    assert outcome.verdict == "nothing lost"
    assert outcome.fault.endswith("kill -9 rank 0 at step 4 + 0.50 (msrun had killed it before)")
    alone = judged(replace(history, strikes=(TIMED_AT._replace(number=0),)), (TIMED,))
    assert alone.broken[0].startswith("broken drill, the fault never struck")


@pytest.mark.parametrize(
    ("order", "strike"),
    [
        (ORDER, TIMED_AT._replace(time=104.001)),  # it was first
        (ORDER, TIMED_AT._replace(attempt=1)),  # of an earlier attempt's end
        (ORDER | {"ranks": [1]}, TIMED_AT),
        (ORDER | {"signum": 15}, TIMED_AT),  # the rank may live on for a while
    ],
)
def test_a_timer_that_struck_in_time_counts(order, strike):
    history = killed(strikes=(STRIKE, strike), events=(*EVENTS[:2], order, *EVENTS[2:]))
    assert "before" not in judged(history, (KILL, TIMED)).fault


def test_a_step_that_was_trained_again_is_a_step_lost():
    outcome = judged(killed(resumed_at=3))
    assert outcome.steps_lost == 1 and outcome.verdict == "1 step lost"


def test_steps_are_counted_over_every_restart_and_run():
    lives = {
        0: (
            life(0, 1, 3),
            RankLife("a", 1, 5.0),  # died before its first commit
            life(0, 2, 4, attempt=2, begun=10.0),
            life(0, 5, 6, run="b", begun=20.0),
        )
    }
    assert steps_lost(DrillHistory(lives, {})) == 2
    assert steps_lost(DrillHistory({}, {})) is None


def test_a_run_that_other_nodes_begin_without_node_0_is_told():
    lives = {
        rank: (life(rank, 1, 3), life(rank, 4, STEPS, run="b", begun=10.0)) for rank in range(RANKS)
    }
    faults = (NodeFault(0, 4),)
    outcome = judged(killed(lives=lives, events=()), faults, departures=(DrillExit(0, 20.0),))
    assert (outcome.answer, outcome.verdict) == ("node 0 replaced 1x", "nothing lost")


@pytest.mark.parametrize(
    ("for_s", "verdict"),
    [(5.0, "a cable that was back in time caused a recovery"), (20.0, "nothing lost")],
)
def test_a_short_cut_may_disturb_nobody(for_s, verdict):
    lives = {rank: (life(rank, 1, STEPS),) for rank in range(RANKS)}
    replaced = ({"time": 104.0, "event": "ReplaceRanks", "newcomers": [1]},)
    faults = (NodeFault(1, 4, NodeDeed.CUT, for_s=for_s),)
    assert judged(killed(lives=lives, events=()), faults).verdict == "nothing lost"
    assert judged(killed(lives=lives, events=replaced), faults).verdict == verdict


def test_one_rank_being_ahead_counts():
    lives = {
        0: (life(0, 1, 3), life(0, 3, 6, attempt=1, begun=9.0)),
        1: (life(1, 1, 2), life(1, 3, 6, attempt=1, begun=9.0)),
    }
    assert judged(killed(lives=lives)).verdict == "1 step lost"


@pytest.mark.parametrize(
    ("final", "sentence"),
    [
        (FinalState(STEPS, "others", "private 1"), "weights differ on rank 1"),
        (FinalState(STEPS, "weights", "private 0"), "random state or buffers differ on rank 1"),
        (FinalState(5, "weights", "private 1"), "rank 1 ended with step 5 instead of 6"),
    ],
)
def test_a_bit_that_differs_breaks_the_promise(final, sentence):
    outcome = judged(killed(finals=finals(_1=final)))
    assert outcome.verdict == sentence and not outcome.weights_equal


def test_a_loss_that_differs_breaks_the_promise():
    history = killed()
    history.lives[1][1].losses[5][1] = (7.5).hex()
    assert judged(history).verdict == "the loss of rank 1 differs at step 5"


def test_the_last_life_counts_for_a_step_that_was_repeated():
    history = killed()
    history.lives[0][0].losses[4] = ["0x1p+0"]  # begun, never committed
    assert judged(history).broken == ()


def test_a_rank_that_died_before_its_own_commit_says_nothing_of_that_step():
    lives = {
        0: (life(0, 1, 4), life(0, 5, 6, attempt=1, begun=10.0)),
        1: (life(1, 1, 3), life(1, 5, 6, attempt=1, begun=10.0)),
    }
    outcome = judged(killed(lives=lives))
    assert outcome.broken == () and outcome.steps_lost == 0


def test_a_committed_step_without_its_loss_is_missed():
    history = killed()
    del history.lives[1][0].losses[2]
    assert judged(history).verdict == "the loss of rank 1 differs at step 2"


def test_a_fault_beyond_the_end_is_a_broken_drill():
    outcome = judge((Fault(1, 40),), REFERENCE, REFERENCE, exit_code=0)
    assert "broken drill, the fault never struck" in outcome.verdict
    assert "training ended with step 6" in outcome.verdict
    assert outcome.training_s is None


def test_an_exception_without_any_effect_was_none():
    """One that a destructor or a library swallowed says nothing about what msrun can do."""
    fault = (Fault(1, 4, deed=Deed.RAISE),)
    unharmed = DrillHistory(REFERENCE.lives, finals(), (STRIKE,), EVENTS[:1])
    succeeded = {"time": 106.0, "event": "WorkerExited", "rank": 1, "exit_code": 0}
    for history in (unharmed, replace(unharmed, events=(*EVENTS[:1], succeeded))):
        assert judged(history, fault).verdict == (
            "broken drill, nothing was injected: the exception in rank 1 at step 4 + 0.50 had no "
            "effect, as whatever it interrupted caught or ignored it"
        )
    raised = {"time": 104.002, "event": "Raised", "rank": 1}
    assert judged(killed(events=(raised, *EVENTS)), fault).verdict == "nothing lost"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"exit_code": 1}, "the job failed with exit code 1"),
        ({"exit_code": None, "took_s": 61.0}, "cancelled after 61 s without an end"),
        ({"left": 2}, "2 processes outlived the job"),
    ],
)
def test_an_end_that_is_none_breaks_the_promise(more, sentence):
    assert judged(killed(), **more).verdict == sentence


def test_a_failed_job_has_no_equal_weights_and_says_why():
    finish = {"time": 110.0, "event": "Finish", "reason": "rank 0 exited with code 1"}
    outcome = judged(killed(events=(*EVENTS, finish)), exit_code=1)
    assert not outcome.weights_equal
    assert outcome.verdict == "the job failed with exit code 1: rank 0 exited with code 1"


def test_a_stop_must_disturb_nobody():
    stop = (Fault(1, 4, deed=Deed.STOP),)
    harmed = judged(killed(), stop)
    assert harmed.verdict == "a stopped rank caused a restart"
    unharmed = judged(DrillHistory(REFERENCE.lives, finals(), (STRIKE,)), stop)
    assert unharmed.broken == () and unharmed.training_s == pytest.approx(0.5)


def test_a_reference_must_be_worth_comparing_with():
    assert check_reference(REFERENCE, 0, RANKS) == ""
    assert "exit code 3" in check_reference(REFERENCE, 3, RANKS)
    assert "did not end in time" in check_reference(REFERENCE, None, RANKS)
    assert "rank 2 of the undisturbed" in check_reference(REFERENCE, 0, RANKS + 1)


# --- reading and showing ------------------------------------------------------------------------


def test_what_ranks_and_msrun_wrote_is_read_back(tmp_path, monkeypatch):
    for name in ("traces", "ckpt/tft_saved_checkpoints-step_3", "logs/earlier/1"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(trace, "time", SimpleNamespace(monotonic=lambda: 7.0))
    for attempt in (0, 1):
        env = RankEnv(1, 2, attempt, "a", "", "")
        seen = TrainingTrace(DrillPlan(str(tmp_path / "traces")), env)
        seen.backward_begins(attempt + 1, 0.5)
        seen.backward_begins(attempt + 1, 0.25)
        seen.committed(attempt + 1)
        seen.close()
    seen.training_ended(2, "d", "p")
    with open(DrillLayout(tmp_path / "traces").lines(1), "a") as file:
        file.write('{"loss": "0x')  # killed while it wrote
    mark = {"time": 5.0, "at": 1.0, "step": 2, "attempt": 0, "pid": 1, "fault": "x"}
    (tmp_path / "traces/struck_0.json").write_text(json.dumps(mark))
    (tmp_path / "traces/struck_1.json").write_text("")
    manifest = {"saved_at": 6.0, "step": 3, "shards": [{"nbytes": 5}, {"nbytes": 6}]}
    (tmp_path / "ckpt/tft_saved_checkpoints-step_3/manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "logs/events.jsonl").write_text('{"time": 2, "event": "B"}\n{"time"')
    (tmp_path / "logs/earlier/1/events.jsonl").write_text('{"time": 1, "event": "A"}\n')
    history = drill_history.read(tmp_path)
    assert [(one.attempt, one.commits) for one in history.lives[1]] == [
        (0, {1: 7.0}),
        (1, {2: 7.0}),
    ]
    assert history.curve(1) == {step: ((0.5).hex(), (0.25).hex()) for step in (1, 2)}
    assert history.finals == {1: FinalState(2, "d", "p")} and history.last_step == 2
    assert history.strikes == (Strike(0, 5.0, 1.0, 2, 0),)
    assert [event["event"] for event in history.events] == ["A", "B"]
    assert history.dumps == (SavedStep(6.0, 3, 11),)


def test_two_processes_may_be_a_rank_for_a_while(tmp_path):
    """A node that was cut off knew nothing of the run that went on without it: 18 steps were lost
    that nobody had trained twice.
    """
    (tmp_path / "traces").mkdir()
    plan = DrillPlan(str(tmp_path / "traces"))
    cut_off, new = (TrainingTrace(plan, RankEnv(1, 2, 0, run, "", "")) for run in ("a", "b"))
    cut_off.committed(1)
    new.committed(2)
    cut_off.attempt_begins(1)
    new.committed(3)
    for each in (cut_off, new):
        each.close()
    history = drill_history.read(tmp_path)
    found = [(one.run, one.attempt, [*one.commits]) for one in history.lives[1]]
    assert found == [("a", 0, [1]), ("b", 0, [2, 3]), ("a", 1, [])]
    assert steps_lost(history) == 0


@pytest.mark.parametrize("content", ["", "5", "[1, 2]", "null"])
def test_files_that_hold_no_facts_are_left_out(content, tmp_path):
    (tmp_path / "traces").mkdir()
    for name in ("rank_0.jsonl", "rank_0.json", "struck_0.json"):
        (tmp_path / "traces" / name).write_text(content)
    (tmp_path / "ckpt/tft_saved_checkpoints-step_3").mkdir(parents=True)
    (tmp_path / "ckpt/tft_saved_checkpoints-step_3/manifest.json").write_text(content)
    assert drill_history.read(tmp_path) == DrillHistory({0: ()}, {})


def test_ranks_that_are_struck_alike_are_named_together():
    outcome = judged(killed(), tuple(KILL._replace(rank=rank) for rank in (1, 0, 2)))
    assert outcome.fault == "kill -9 ranks 0-2 at step 4, backward"


def test_a_line_for_people():
    assert table.row(judged(killed())) == (
        "kill -9 rank 1 at step 4, backward",
        *("3 ms", "10 ms", "40 ms, 2.0 MB", "3", "0", "10.5 s", "1x restarted", "yes"),
        "nothing lost",
    )
    nothing = judge((Fault(1, 40),), REFERENCE, REFERENCE, exit_code=0)
    assert table.row(nothing)[1:8] == ("-", "-", "-", "-", "0", "-", "-")


def test_json_for_programs():
    facts = {"steps": 6, "took_s": 1.0, "trouble": ""}
    good = json.loads(json.dumps(table.as_json(facts, [judged(killed())])))
    assert good["ok"] and good["drills"][0]["steps_lost"] == 0
    assert not table.as_json(facts, [judged(killed(), exit_code=1)])["ok"]
    assert not table.as_json(facts | {"trouble": "x"}, [])["ok"]


def test_the_table_is_plain_in_a_pipe(capfd):
    table.show([judged(killed()), judged(killed(), exit_code=1)])
    header, good, bad = capfd.readouterr().out.splitlines()
    assert header.split("  ")[0] == "fault" and "weights equal" in header
    assert good.endswith("yes            nothing lost") and bad.endswith("exit code 1")
