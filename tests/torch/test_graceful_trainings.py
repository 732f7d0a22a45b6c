"""Trainings that are asked to leave: all ranks after one step, with 0, and nothing is lost by it."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from support.jobs import DEADLINE_S, Job, Launcher, poll
from support.warm_python import WarmPython

from agent.spec.job_spec import DumpSpec
from worker_hooks.storage import manifest as manifests

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCRIPT = Path(__file__).parents[1] / "workers" / "train_exit.py"
RANKS = 2
VALIDATION_S = 60
TRIGGERED = "Graceful exit is triggered, stop training.\n"


def train(msrun: Launcher, name: str, *options: object, **flags: object) -> Job:
    words = [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
    log_dir = msrun.tmp / f"logs_{name}"
    places = (f"--ckpt=ckpt_{name}", f"--files=files_{name}")
    ranks = f"--nproc-per-node={RANKS}"
    return msrun.start(ranks, *words, SCRIPT, *places, *options, log_dir=log_dir)


def weights(job: Job) -> list[str]:
    return weights_in(job.logs().values())


def weights_in(logs: Iterable[str]) -> list[str]:
    found = [re.findall(r"ended at step \d+, weights \w+", log) for log in logs]
    return sorted(line for lines in found for line in lines)


def ask_msrun(job: Job) -> None:
    job.signal(signal.SIGTERM)


def ask_a_rank(job: Job) -> None:
    os.kill(job.pids()[1], signal.SIGTERM)


def ask_by_file(job: Job) -> None:
    (job.folder.parent / "exit.json").write_text('{"GracefulExit": 1}')


def left(job: Job, folder: Path) -> manifests.Manifest:
    """The job left gracefully; what it saved."""
    ended = job.wait()
    logs = {name: log for name, log in job.logs().items() if name.startswith("worker")}
    assert ended.code == 0, (ended, logs)
    for name, log in logs.items():
        assert log.count(TRIGGERED) == 1, (name, log)
        assert "Traceback" not in log
    (dump,) = folder.glob("tft_saved_checkpoints-step_*[0-9]")
    found = manifests.read(dump)
    assert manifests.verify(dump, found) == []
    assert (found.odd, found.without_private, found.stale_private) == ((), (), ())
    assert "graceful exit" in found.reason
    begun = [re.findall(r"begins step (\d+)", log) for log in logs.values()]
    steps = {max(map(int, each)) for each in begun if each} or {found.step}
    assert steps == {found.step}, "a rank has begun a step that nobody saved"
    return found


CASES = {
    "msrun": (ask_msrun, "begins step 5", ("--program",), 0),
    "a rank": (ask_a_rank, "begins step 5", (), 0),
    "a file": (ask_by_file, "begins step 3", ("--json=exit.json",), 0),
    "accumulation": (ask_msrun, "begins step 2, batch 4", ("--accumulate=3", "--workers=1"), 2),
    "validation": (ask_a_rank, "validates after step 8", ("--validate-s=1",), 9),
    "a load": (ask_msrun, "loads for step 3", ("--load-s=0.8",), 3),
    "should_exit": (ask_msrun, "begins step 5", ("--loop=own",), 0),
    "ExitByRequest": (ask_a_rank, "begins step 5", ("--loop=by",), 0),
}


SLOW = ("--program", "--validate-s", "--load-s", "--json")
"""What changes no weight."""
SAME = {"--loop=by": "--loop=own"}
"""Who is asked whether to leave changes no weight either."""


Undisturbed = Callable[[tuple[str, ...]], list[str]]


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher, warm_python: WarmPython) -> Undisturbed:
    """The final weights of a training with these options that nobody disturbs, which runs once."""

    @functools.cache
    def final_weights(options: tuple[str, ...]) -> list[str]:
        folder = launcher.tmp / " ".join(options)
        return weights_in(warm_python.train(folder, RANKS, SCRIPT, *options))

    return final_weights


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_where_it_was_left_bit_for_bit(
    msrun: Launcher, undisturbed: Undisturbed, case: str
) -> None:
    ask, moment, options, step = CASES[case]
    quick = ("--epochs=3", *(each for each in options if not each.startswith(SLOW)))
    whole = undisturbed(tuple(SAME.get(each, each) for each in quick))
    job = train(msrun, "left", "--pause=0.05", "--epochs=3", *options)
    job.await_lines(moment, RANKS)
    ask(job)
    found = left(job, msrun.tmp / "ckpt_left")
    assert step in {0, found.step}
    assert found.step < 24
    for rank in range(RANKS):
        folder = msrun.tmp / "files_left" / f"rank_{rank}"
        programs = ["Small_train.pt2"] if "--program" in options else []
        assert sorted(os.listdir(folder)) == [*programs, "Small_train.safetensors"]
        with safe_open(folder / "Small_train.safetensors", framework="pt") as file:
            assert file.metadata()["global_step"] == str(found.step)
    saved = [
        safetensors.torch.load_file(msrun.tmp / f"files_left/rank_{rank}/Small_train.safetensors")
        for rank in range(RANKS)
    ]
    assert torch.equal(saved[0]["0.weight"], saved[1]["0.weight"])
    resumed = train(msrun, "left", *quick, resume="")
    assert resumed.wait().code == 0, resumed.logs()
    assert weights(resumed) == whole
    assert len(whole) == RANKS


def test_a_large_state_is_saved_in_its_first_steps_and_in_those_behind_a_resume(
    msrun: Launcher, undisturbed: Undisturbed
) -> None:
    options, step = ("--epochs=3", "--large"), 0
    for begun in (1, 1, 2):  # steps of the first life, and of two behind a resume
        resume = {"resume": ""} if step else {}
        job = train(msrun, f"left_{step}", *options, "--pause=0.3", "--ckpt=saved", **resume)
        job.await_lines(f"begins step {step + begun},", RANKS)
        ask_msrun(job)
        ended = job.wait()
        assert ended.code == 0, (ended, job.logs())
        assert "Traceback" not in "".join(job.logs().values())
        found = manifests.read(max((msrun.tmp / "saved").iterdir(), key=step_of))
        assert found.step >= step + begun
        step = found.step
    resumed = train(msrun, "last", *options, "--ckpt=saved", resume="")
    assert resumed.wait().code == 0, resumed.logs()
    assert weights(resumed) == undisturbed(options)


def step_of(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def test_a_rank_that_is_blocked_in_a_collective_is_heard_at_once(msrun: Launcher) -> None:
    job = train(msrun, "left", f"--validate-s={VALIDATION_S}", "--epochs=2", grace=3)
    job.await_lines("validates after step 8", RANKS)
    os.kill(job.pids()[1], signal.SIGSTOP)  # so that rank 0 waits for it in C
    asked = time.monotonic()
    os.kill(job.pids()[0], signal.SIGTERM)
    job.await_state("holding")
    assert time.monotonic() - asked < DumpSpec().answer_s
    os.kill(job.pids()[1], signal.SIGCONT)
    job.signal(signal.SIGTERM)  # nobody waits for the end of a validation
    assert job.wait().code != 0
    found = manifests.read(msrun.tmp / "ckpt_left" / "tft_saved_checkpoints-step_8")
    assert found.step == 8


def test_ranks_that_stay_save_when_msrun_is_killed(msrun: Launcher) -> None:
    job = train(msrun, "left", "--pause=1")
    job.await_lines("begins step 3", RANKS)
    ask_msrun(job)
    job.await_state("holding")
    job.signal(signal.SIGKILL)
    job.process.wait()
    poll(lambda: not msrun.marked())
    (dump,) = (msrun.tmp / "ckpt_left").glob("tft_saved_checkpoints-step_*[0-9]")
    found = manifests.read(dump)
    assert manifests.verify(dump, found) == []
    assert found.step in {2, 3}
    assert found.without_private == ()


def test_a_caught_signal_makes_no_stop_slower(msrun: Launcher) -> None:
    """The very signal that asks for an exit stops ranks that come to no boundary soon."""
    job = train(msrun, "left", "--validate-s=300", "--epochs=2")
    job.await_lines("validates after step 8", RANKS)
    ask_msrun(job)
    job.await_state("holding")
    ask_msrun(job)
    began = time.monotonic()
    assert job.wait().code == 128 + signal.SIGTERM
    assert time.monotonic() - began < DumpSpec().answer_s
    assert TRIGGERED not in "".join(job.logs().values())
    found = manifests.read(msrun.tmp / "ckpt_left" / "tft_saved_checkpoints-step_8")
    assert found.step == 8


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGABRT])
def test_a_rank_that_dies_while_the_others_stay_loses_nothing(
    msrun: Launcher, undisturbed: Undisturbed, signum: int
) -> None:
    job = train(msrun, "left", "--validate-s=5", "--epochs=2", max_restarts=1)
    job.await_lines("validates after step 8", RANKS)
    ask_msrun(job)
    job.await_state("holding")
    os.kill(job.pids()[1], signum)
    ended = job.wait()
    assert ended.code == 128 + signal.SIGTERM, ended
    found = manifests.read(msrun.tmp / "ckpt_left" / "tft_saved_checkpoints-step_8")
    assert (found.step, found.without_private) == (8, ())
    resumed = train(msrun, "left", "--epochs=2", resume="")
    assert resumed.wait().code == 0
    assert weights(resumed) == undisturbed(("--epochs=2",))


def test_what_a_training_was_asked_does_not_stop_the_next(msrun: Launcher) -> None:
    (msrun.tmp / "exit.json").write_text(json.dumps({"GracefulExit": 1}))
    job = train(msrun, "next", "--json=exit.json", "--epochs=1")
    assert job.wait().code == 0
    assert len(weights(job)) == RANKS


def test_a_process_alone_leaves_after_its_step(msrun: Launcher) -> None:
    """Without msrun."""

    environ = msrun.env(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    words = [sys.executable, "-u", SCRIPT, "--pause=0.05", "--epochs=99"]
    with subprocess.Popen(words, env=environ, cwd=msrun.tmp, stdout=-1, stderr=-2) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if b"begins step 4" in line:
                process.terminate()
                break
        rest = process.stdout.read().decode()
        assert process.wait(DEADLINE_S) == 0, rest
    assert TRIGGERED in rest
    with safe_open(msrun.tmp / "files/rank_0/Small_train.safetensors", framework="pt") as file:
        assert int(file.metadata()["global_step"]) >= 4


def test_a_signal_to_every_process_at_once_loses_nothing(msrun: Launcher) -> None:
    """As Slurm and systemd stop a job; the script has no callback for it."""
    script = SCRIPT.with_name("train_small.py")
    job = msrun.start("--nproc-per-node=3", script, "--say", "--pause=0.05", "--epochs=20")
    job.await_lines("step 4", 3)
    for pid in (*job.pids().values(), job.pid):
        os.kill(pid, signal.SIGTERM)
    found = left(job, msrun.tmp / "checkpoints")
    assert found.step >= 4
