"""Drills of a real msrun with ranks that only play training: what is promised, and each way to break it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import DEADLINE_S, WORKERS, Ended, Launcher, poll

from agent.spec.job_spec import Timeouts

PLAY = WORKERS / "play_training.py"
LONG = "steps=100"  # goes on for a second behind step 4, so that a request to leave finds it


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "msrun", "drill", *map(str, words)]


def drill(launcher: Launcher, *options: object, play: str = "steps=8", job: str = "") -> Ended:
    """`msrun drill OPTIONS -- --worker_num=2 play_training.py`."""
    line = [
        *options,
        "--",
        "--worker_num=2",
        "--start-method=spawn",
        *job.split(),
        PLAY,
        *play.split(),
    ]
    return launcher.drill(*line, within_s=280)


def drilled(launcher: Launcher, *options: object, **more: str) -> dict:
    ended = drill(launcher, "--json", *options, **more)
    content = json.loads(ended.out)
    assert ended.code == (0 if content["ok"] else 1), ended.err
    return content


def left_folders(launcher: Launcher) -> list[str]:
    return sorted(path.name for path in launcher.tmp.glob("msrun-drill-*"))


def test_a_killed_rank_is_noticed_restarted_and_compared(msrun: Launcher) -> None:
    told = drilled(msrun, "--kill", "rank=1,step=5,phase=forward", "--kill", "rank=0,step=3,exit=3")
    assert told["ok"], told
    assert told["reference"]["steps"] == 8
    first, second = told["drills"]
    assert first["steps_lost"] == second["steps_lost"] == 0
    assert first["weights_equal"] and first["verdict"] == "nothing lost"
    assert 0 < first["noticed_s"] < first["training_s"] < DEADLINE_S
    assert left_folders(msrun) == []
    assert not msrun.marked()


def test_the_table_and_the_exit_code_say_what_broke(msrun: Launcher) -> None:
    ended = drill(msrun, "--kill", "rank=1,step=5", play="steps=8 lose=2")
    assert ended.code == 1
    header, line = ended.out.splitlines()
    assert header.startswith("fault") and line.endswith("steps lost")
    assert left_folders(msrun)[0] in ended.err  # what proves it is kept


@pytest.mark.parametrize(
    ("play", "fault", "sentence"),
    [
        ("steps=8 drift=1", "rank=1,step=5", "weights differ on rank 0; weights differ on rank 1"),
        ("steps=4", "rank=1,step=9", "broken drill, the fault never struck"),
    ],
)
def test_broken_promises(msrun: Launcher, play: str, fault: str, sentence: str) -> None:
    told = drilled(msrun, "--kill", fault, play=play)
    assert sentence in told["drills"][0]["verdict"]
    assert not told["reference"]["not_deterministic"]


def test_a_script_that_ends_differently_each_time_is_called_so(msrun: Launcher) -> None:
    ended = drill(msrun, "--kill", "rank=1,step=5", play="steps=8 unseeded=1")
    assert ended.code == 1
    assert "weights differ on rank 0" in ended.out
    assert "the script is not deterministic, so nothing is known" in ended.err
    assert "of two undisturbed runs weights differ on rank 0. Seed" in ended.err


def test_a_stopped_rank_disturbs_nobody(msrun: Launcher) -> None:
    told = drilled(msrun, "--stop", "rank=1,step=4,phase=data,for=0.5")
    assert told["ok"], told
    assert told["drills"][0]["training_s"] > 0.45
    assert told["drills"][0]["noticed_s"] is None


def test_a_preempted_job_that_leaves_in_time_is_not_killed(msrun: Launcher) -> None:
    told = drilled(msrun, "--preempt", "step=4,phase=forward,grace=60", play=LONG)
    assert told["ok"], told
    (one,) = told["drills"]
    assert one["in_time"] and one["runs"] == 2 and one["steps_lost"] == 0
    assert 0 < one["noticed_s"] < one["left_s"] < 60  # the grace
    assert one["verdict"] == f"nothing lost; saved in time, exited after {one['left_s']:.2f} s"
    assert not msrun.marked()


@pytest.mark.parametrize(("lose", "what"), [(0, "nothing lost; saved"), (2, "lost; not saved")])
def test_a_preempted_job_that_stays_is_killed_with_all_its_ranks(
    msrun: Launcher, lose: int, what: str
) -> None:
    play = f"steps=200 deaf=1 lose={lose}"  # it does not end by itself while a busy machine is late
    (one,) = drilled(msrun, "--preempt", "step=4,grace=2", play=play)["drills"]
    assert f"{what} in time, killed after 2" in one["verdict"]
    assert 2 <= one["left_s"] < Timeouts().grace_s and one["runs"] == 2
    assert bool(one["steps_lost"]) == bool(lose) and one["weights_equal"]
    assert not msrun.marked()


def test_a_job_that_cannot_leave_gracefully_breaks_its_promise(msrun: Launcher) -> None:
    (one,) = drilled(msrun, "--graceful", "step=4,phase=commit", play=LONG)["drills"]
    # where the ranks stood when the signal reached them is chance, and may be broken as well
    assert one["broken"][0] == "the graceful exit ended with exit code 143 instead of 0"
    assert one["weights_equal"] and one["runs"] == 2  # there was no checkpoint to go on from


def test_two_faults_in_one_drill_and_random_ones_from_a_file(msrun: Launcher) -> None:
    (msrun.tmp / "drills.yaml").write_text(
        "- kill: [{rank: 1, step: 3}, {rank: 0, step: 6, phase: commit}]\n- {random: 2, seed: 4}\n"
    )
    told = drilled(msrun, "--faults", "drills.yaml")
    assert told["ok"], told
    assert [" + kill" in one["fault"] for one in told["drills"]] == [True, False, False]


def test_a_job_that_trains_without_hooks_cannot_be_drilled(msrun: Launcher) -> None:
    ended = drill(msrun, "--kill", "rank=1,step=3", play="steps=4 forget=1")
    assert ended.code == 1
    assert "ranks 0-1 of the undisturbed run did not train to an end" in ended.err


def test_a_job_that_hangs_is_called_off(msrun: Launcher) -> None:
    ended = drill(msrun, "--timeout", "1", "--kill", "rank=1,step=3", play="steps=100000")
    assert ended.code == 1
    assert "did not end in time" in ended.err
    assert not msrun.marked()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_drill_that_is_stopped_leaves_nothing(msrun: Launcher, signum: int) -> None:
    line = command("--kill", "rank=1,step=3", "--", "--worker_num=2", PLAY, "steps=100000")
    with subprocess.Popen(
        line,
        env=msrun.env(TMPDIR=str(msrun.tmp)),
        cwd=msrun.tmp,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        poll(lambda: list(msrun.tmp.glob("msrun-drill-*/reference/traces/rank_1.jsonl")))
        os.kill(process.pid, signum)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    assert (out, err.strip()) == (b"", b"")
    assert not msrun.marked()
    assert left_folders(msrun) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--kill rank=1 -- train.py", "kill: step is missing"),
        ("--kill rank=7,step=1 -- --worker_num=2 {play}", "the ranks are 0 to 1"),
        ("-- {play}", "no fault is given"),
        ("--random 0 -- {play}", "--random"),
        ("--random 2 --of fun -- {play}", "'fun' is an unknown kind"),
        ("--graceful rank=0,step=1 -- {play}", "'rank' is unknown"),
        ("--faults none.yaml -- {play}", "none.yaml cannot be read"),
        ("--kill rank=0,step=1 -- --resume", ""),
    ],
)
def test_wrong_use_is_one_sentence(msrun: Launcher, words: str, sentence: str) -> None:
    done = subprocess.run(
        command(*(word.format(play=PLAY) for word in words.split())),
        env=msrun.env(),
        cwd=msrun.tmp,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and sentence in done.stderr
    assert not Path(msrun.tmp, "reference").exists()
