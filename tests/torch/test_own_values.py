"""What a script keeps for itself is as it would have been, whatever dies."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from support.jobs import WORKERS, Launcher
from support.training_kinds import RANKS, Run, msrun_of, run
from support.warm_python import WarmPython

from msrun.drill.fault_options import read_words
from msrun.trials.history import read
from worker_hooks.drill.plan import DrillPlan

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCRIPT = WORKERS / "train_and_keep.py"
LOOP = WORKERS / "carry_locals.py"
LATE = WORKERS / "late_values.py"
TRAINER = WORKERS / "train_by_trainer.py"
OWN_LOOP = WORKERS / "loop_of_its_own.py"

REPLACED = "rank=0,step=3,phase=update"  # its peers commit the step, with values changed after it
RESTARTED = "rank=1,step=6,phase=commit"
STOPPED = "rank=2,step=9,phase=forward"
RESUME = f"exec {shlex.quote(sys.executable)} -m msrun --resume"


def values(folder: Path) -> list[dict]:
    return [json.loads((folder / "out" / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_values_outside_of_the_state_survive_replacement_restart_and_resume(
    launcher: Launcher, warm_python: WarmPython
) -> None:
    plain = launcher.tmp / "plain"
    warm_python.train(plain, RANKS, SCRIPT, "out")

    words = msrun_of(launcher, f"--worker_num={RANKS}", "--max-restarts=1", "--max_replacements=1")
    folder = launcher.tmp / "killed"
    faults = read_words(f"{REPLACED}+{RESTARTED}+{STOPPED}", "kill").faults
    plan = DrillPlan(str(folder / "traces"), str(folder / "ckpt"), faults)
    script = f"mkdir traces ckpt; env MSRUN_DRILL='{plan.encode()}' \"$@\"; {RESUME}"
    killed = run(
        launcher,
        folder,
        *("sh", "-c", script, "sh", *words, SCRIPT, "out"),
    )
    assert killed.ended.code == 0, killed.ended.out
    history = read(folder)
    assert [each.step for each in history.strikes] == [3, 6, 9]
    (replaced,) = (each["step"] for each in history.events if each["event"] == "ReplaceRanks")
    assert replaced in {2, 3}  # what the dead rank has sent last may be lost with its connections
    assert "differs between ranks" not in killed.ended.out
    assert values(folder) == values(plain)


def test_a_variable_of_the_loop_that_nothing_keeps_is_named_before_a_step_depends_on_it(
    launcher: Launcher,
) -> None:
    words = msrun_of(launcher, "--worker_num=1", "--max-restarts=1")
    named = run(launcher, launcher.tmp / "named", *words, LOOP, "elsewhere")
    assert named.ended.code == 0, named.ended.out
    assert named.ended.out.count("msrun: ") == 4  # one says what protects a rank alone
    for told in ("printed values may differ", "`best` begins anew", "`batch` (Tensor) begins anew"):
        assert told in named.ended.out

    for loop in ("own", "batches"):
        kept = run(launcher, launcher.tmp / loop, *words, LOOP, loop)
        assert kept.ended.code == 0, kept.ended.out
        assert kept.ended.out.count("msrun: ") == 2
        assert "`batch` (Tensor) begins anew after a replacement" in kept.ended.out

    strict = run(launcher, launcher.tmp / "strict", *words, "--strict", LOOP, "batches")
    assert strict.ended.code == 2, strict.ended.out
    assert "`batch` (Tensor) begins anew" in strict.ended.out
    assert "refused, because of --strict" in strict.ended.out
    assert "`best`" not in strict.ended.out
    assert "average" not in strict.ended.out

    quiet = run(launcher, launcher.tmp / "quiet", *words, "--strict", LOOP, "elsewhere", "--quiet")
    assert quiet.ended.code == 0, quiet.ended.out
    assert "anew" not in quiet.ended.out


def killed_in_its_update(launcher: Launcher, folder: Path, kind: str) -> Run:
    """Its peers commit the step, unless the machine is too busy for them."""
    words = msrun_of(launcher, f"--worker_num={RANKS}", "--max-restarts=1")
    faults = read_words("rank=1,step=5,phase=update", "kill").faults
    plan = DrillPlan(str(folder / "traces"), "", faults)
    script = f"mkdir traces; env MSRUN_DRILL='{plan.encode()}' \"$@\""
    return run(launcher, folder, "sh", "-c", script, "sh", *words, LATE, kind, "out")


@pytest.mark.parametrize("kind", ["own", "variable", "printed", "equal", "registered"])
def test_a_value_that_died_with_its_rank_is_known_from_the_others_or_the_step_is_refused(
    launcher: Launcher, warm_python: WarmPython, kind: str
) -> None:
    plain = launcher.tmp / f"{kind}-plain"
    warm_python.train(plain, RANKS, LATE, kind, "out")

    for trial in range(4):
        folder = launcher.tmp / f"{kind}-killed-{trial}"
        killed = killed_in_its_update(launcher, folder, kind)
        assert killed.ended.code == 0, killed.ended.out
        history = read(folder)
        assert [each.step for each in history.strikes] == [5]
        replaced = [each["step"] for each in history.events if each["event"] == "ReplaceRanks"]
        if replaced != [4]:  # else its peers were stopped in front of their updates
            break
    refusal = "did not reach the commit of step 5, "
    said = {
        "own": "`state.own.mean` differs by rank: if a rank dies between its backward and its "
        "commit, the step is not saved",
        "variable": "`mean` differs by rank: if a rank dies between its backward and its commit, "
        "the step is not saved",
        "printed": "",
        "equal": "",
        "registered": "`state.registered.meter` differs by rank: if a rank dies between its "
        "backward and its commit, the step is not saved",
    }
    before_death = killed.ended.out.partition("was killed")[0]
    assert said[kind] in before_death
    assert ("by rank" in before_death) == bool(said[kind])
    if kind in {"own", "variable", "registered"}:
        assert not replaced
        assert refusal in killed.ended.out
        assert "change it before backward" in killed.ended.out
    else:
        assert replaced == [5]
        assert refusal not in killed.ended.out
    for rank in range(RANKS):
        mine, other = (each / f"out.{rank}" for each in (folder, plain))
        assert mine.read_text() == other.read_text()


def test_data_whose_place_nobody_puts_back_are_said_before_a_death(launcher: Launcher) -> None:
    """A trainer owns the loop; restarted, it would train on the first batches again."""
    folder = launcher.tmp / "trainer"
    folder.mkdir()
    words = ("--worker_num=2", "--max-restarts=1", TRAINER)
    job = launcher.start(*words, log_dir=folder / "logs", cwd=folder)
    job.await_lines("step 3\n", 2)
    os.kill(job.pids()[1], signal.SIGKILL)
    ended = job.wait()
    assert ended.code == 0, ended
    before_death = ended.err.partition("was killed by SIGKILL")[0]
    assert "a DataLoader is looped over without state.batches()" in before_death, ended.err


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("range", "loop_of_its_own.py:39 `for number in range(STEPS)` begins anew after"),
        ("list", "loop_of_its_own.py:47 `for x in batches` begins anew after"),
        ("right", ""),
    ],
)
def test_a_loop_that_would_begin_anew_is_said_before_a_death(
    launcher: Launcher, kind: str, told: str
) -> None:
    folder = launcher.tmp / kind
    folder.mkdir()
    words = ("--worker_num=2", "--max-restarts=1", OWN_LOOP, kind)
    job = launcher.start(*words, log_dir=folder / "logs", cwd=folder)
    job.await_lines("made 3\n", 2)
    os.kill(job.pids()[1], signal.SIGKILL)
    ended = job.wait()
    assert ended.code == 0, ended
    before_death, _, behind = ended.err.partition("was killed by SIGKILL")
    assert behind
    assert told in before_death, ended.err
    assert ("begins anew" in ended.err) == bool(told), ended.err
    has_more = "trained 8\n" not in ended.out  # so the sentence is true
    assert has_more == bool(told), ended.out


def test_a_loop_that_would_begin_anew_is_refused_unless_the_script_says_that_it_does_not(
    launcher: Launcher,
) -> None:
    words = msrun_of(launcher, "--worker_num=1", "--strict")
    refused = run(launcher, launcher.tmp / "anew", *words, OWN_LOOP, "range")
    assert refused.ended.code == 2, refused.ended.out
    assert "for number in range(STEPS)` begins anew" in refused.ended.out
    assert "refused, because of --strict" in refused.ended.out

    for name, kind, rest in [("left", "range", ["--ignore=number"]), ("begun", "right", [])]:
        quiet = run(launcher, launcher.tmp / name, *words, OWN_LOOP, kind, *rest)
        assert quiet.ended.code == 0, quiet.ended.out
        assert "anew" not in quiet.ended.out


def test_the_loss_that_is_printed_behind_a_loop_is_that_of_the_last_step(
    launcher: Launcher,
) -> None:
    """A new rank that comes to the end of an epoch has made no step itself."""
    faults = ("rank=0,step=8,phase=commit", "rank=0,step=9,phase=data", "rank=0,step=9")
    kills = [word for fault in faults for word in ("--kill", fault)]
    drilled = launcher.drill(*kills, "--keep", "--", "--worker_num=2", WORKERS / "print_losses.py")
    assert drilled.code == 0, drilled.err
    (folder,) = launcher.tmp.glob("msrun-drill-*")
    reference, *struck = (
        sorted(re.findall(r"\[rank \d\]: epoch \d loss .*", console.read_text()))
        for console in (
            folder / name / "console.log" for name in ("reference", "001", "002", "003")
        )
    )
    assert len(reference) == 2 * 4
    for lines in struck:
        assert sorted({*lines}) == reference  # an epoch's end may be printed twice, but alike
