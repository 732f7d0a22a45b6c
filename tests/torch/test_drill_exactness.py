"""Exactness, with the drill as the judge: killed and resumed is bitwise the undisturbed run.

What is replaced alone is drilled in test_replacements.py; here all are restarted from a dump, or
leave. A session of drills runs the undisturbed job once.
"""

from __future__ import annotations

import json

import pytest
from support.jobs import WORKERS, Launcher

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SMALL = WORKERS / "train_small.py"
RANKS = "--worker_num=4"
PHASES = (
    "rank=0,step=3,phase=data",
    "rank=1,step=5,phase=forward",
    "rank=2,step=7,phase=backward",
    "rank=3,step=9,phase=update",
    "rank=0,step=11,phase=commit",
)
BESIDES = (
    "rank=0,step=5,phase=forward,raise",  # a moment in a step is late on a busy machine
    "rank=2,step=8,phase=data,signal=SEGV",
    "rank=3,step=11,phase=backward,attempt=2",  # all hold step 10, so any may die while it writes
    "rank=1,phase=dump,attempt=2",
)
BY_CHANCE = "test_a_random_moment_loses_nothing"


def drilled(launcher: Launcher, *options: str, job: tuple[str, ...] = ()) -> list[dict]:
    """Every drill's outcome; nothing of the user's folder was touched, nothing is left."""
    job_words = (RANKS, *job, SMALL, "--epochs=2", "--pause=0.005", "--meet")
    done = launcher.drill("--json", *options, "--", *job_words)
    content = json.loads(done.out)
    assert content["reference"]["trouble"] == "", done.err
    assert content["reference"]["steps"] == 16
    assert not (launcher.tmp / "checkpoints").exists()
    assert not launcher.marked()
    return content["drills"]


@pytest.fixture(scope="module")
def restarted(launcher: Launcher) -> list[dict]:
    kills = [f"--kill={'+'.join(faults)}" for faults in (PHASES, BESIDES)]
    return drilled(launcher, *kills, job=("--on_failure=dump,restart", "--max-restarts=2"))


@pytest.fixture(scope="module")
def others(launcher: Launcher, request: pytest.FixtureRequest) -> dict[str, dict]:
    """One at a random moment only if somebody looks at it."""
    by_chance = any(item.name == BY_CHANCE for item in request.session.items)
    (launcher.tmp / "drills.yaml").write_text(
        "- {graceful: {step: 6, phase: data}, kill: {rank: 2, step: 6, phase: backward}}\n"
    )
    found = drilled(
        launcher,
        "--kill=rank=launcher,step=6",
        "--stop=rank=2,step=5,for=1",
        "--graceful=step=6,phase=backward",
        "--preempt=step=9,grace=60",
        "--faults=drills.yaml",
        *(("--random=1", "--seed=1") if by_chance else ()),
    )
    names = ("launcher", "stop", "graceful", "preempt", "both", *(["random"] if by_chance else []))
    return dict(zip(names, found, strict=True))


def check(told: dict) -> None:
    assert (told["broken"], told["steps_lost"], told["weights_equal"]) == ([], 0, True)


def test_a_death_in_every_phase_and_of_every_rank_loses_nothing(restarted: list[dict]) -> None:
    """Two restarts are all that a run may have: then it is resumed as a person would do it."""
    told = restarted[0]
    check(told)
    assert (told["replaced"], told["restarted"], told["runs"]) == (0, 4, 2)
    assert told["dump_bytes"] > 0
    assert told["step_saved"] in {10, 11}


def test_a_second_death_in_the_dump_and_one_after_the_restart_lose_nothing(
    restarted: list[dict],
) -> None:
    told = restarted[1]
    check(told)
    assert (told["replaced"], told["restarted"], told["runs"]) == (0, 2, 2)


def test_a_random_moment_loses_nothing(others: dict[str, dict]) -> None:
    check(others["random"])
    assert others["random"]["runs"] == 1


def test_a_stop_disturbs_nobody(others: dict[str, dict]) -> None:
    check(others["stop"])
    assert others["stop"]["training_s"] > 0.9
    assert (others["stop"]["replaced"], others["stop"]["restarted"]) == (0, 0)


def test_the_death_of_msrun_itself_loses_nothing(others: dict[str, dict]) -> None:
    check(others["launcher"])
    assert others["launcher"]["runs"] == 2


def test_a_graceful_exit_loses_nothing_and_neither_does_a_preemption(
    others: dict[str, dict],
) -> None:
    graceful, preempted = others["graceful"], others["preempt"]
    assert graceful["verdict"].startswith("nothing lost; exited after")
    assert preempted["verdict"].startswith("nothing lost; saved in time, exited after")
    assert graceful["step_saved"] in {6, 7} and preempted["step_saved"] in {9, 10}
    for told in (graceful, preempted):
        check(told)
        assert told["runs"] == 2 and 0 < told["noticed_s"] < told["frozen_s"] < told["left_s"]


def test_a_death_in_a_graceful_exit_loses_nothing(others: dict[str, dict]) -> None:
    check(others["both"])
    assert others["both"]["runs"] >= 2
