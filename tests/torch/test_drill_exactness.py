"""Exactness, with the drill as the judge: killed and resumed is bitwise the undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from jobs import WORKERS, Launcher

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
SMALL = WORKERS / "train_small.py"


def drilled(launcher: Launcher, *options: str, job: str = "--worker_num=4") -> list[dict]:
    """Every drill's outcome; nothing of the user's folder was touched, nothing is left."""
    words = ["--json", *options, "--", *job.split(), SMALL, "--epochs=2", "--pause=0.005"]
    done = subprocess.run(
        [sys.executable, "-m", "msrun", "drill", *map(str, words)],
        env=launcher.env(TMPDIR=str(launcher.tmp)),
        cwd=launcher.tmp,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=280,
        check=False,
    )
    content = json.loads(done.stdout)
    broken = {one["fault"]: one["broken"] for one in content["drills"] if one["broken"]}
    assert (content["reference"]["trouble"], broken) == ("", {}), done.stderr.decode()
    assert done.returncode == 0
    assert content["reference"]["steps"] == 16
    assert not (launcher.tmp / "checkpoints").exists()
    assert not launcher.marked()
    return content["drills"]


def test_a_death_in_every_phase_and_of_every_rank_loses_nothing(msrun: Launcher) -> None:
    phases = ("data", "forward", "backward", "update", "commit")
    kills = [f"--kill=rank={n % 4},step={6 + n},phase={phase}" for n, phase in enumerate(phases)]
    told = drilled(msrun, *kills)
    assert all(one["steps_lost"] == 0 and one["weights_equal"] for one in told)
    assert all(one["dump_bytes"] > 0 and one["step_saved"] in range(4, 12) for one in told)


def test_random_moments_lose_nothing(msrun: Launcher) -> None:
    assert len(drilled(msrun, "--random=4", "--seed=1")) == 4


def test_a_second_death_in_the_dump_and_one_after_the_restart_lose_nothing(msrun: Launcher) -> None:
    drilled(
        msrun,
        "--kill=rank=3,step=6+rank=1,phase=dump",
        "--kill=rank=0,step=5,raise+rank=2,step=10,signal=SEGV",
    )


def test_a_stop_disturbs_nobody(msrun: Launcher) -> None:
    (told,) = drilled(msrun, "--stop=rank=2,step=5,for=1")
    assert told["training_s"] > 0.9


def test_the_death_of_msrun_itself_loses_nothing(msrun: Launcher) -> None:
    (told,) = drilled(msrun, "--kill=rank=launcher,step=6")
    assert told["runs"] == 2


def test_without_a_budget_the_resume_that_a_person_would_type_loses_nothing(
    msrun: Launcher,
) -> None:
    job = "--worker_num=4 --max-restarts=0"
    (told,) = drilled(msrun, "--kill=rank=1,step=6,phase=backward", job=job)
    assert told["runs"] == 2


def test_a_graceful_exit_loses_nothing_and_neither_does_a_preemption(msrun: Launcher) -> None:
    graceful, preempted = drilled(
        msrun, "--graceful=step=6,phase=backward", "--preempt=step=9,grace=60"
    )
    assert graceful["verdict"].startswith("nothing lost; left after")
    assert preempted["verdict"].startswith("nothing lost; saved in time, left after")
    assert graceful["step_saved"] in {6, 7} and preempted["step_saved"] in {9, 10}
    for told in (graceful, preempted):
        assert told["runs"] == 2 and 0 < told["noticed_s"] < told["frozen_s"] < told["left_s"]


def test_a_death_in_a_graceful_exit_loses_nothing(msrun: Launcher) -> None:
    (msrun.tmp / "drills.yaml").write_text(
        "- {graceful: {step: 6, phase: data}, kill: {rank: 2, step: 6, phase: backward}}\n"
    )
    (told,) = drilled(msrun, "--faults=drills.yaml")
    assert told["runs"] >= 2 and told["steps_lost"] == 0
