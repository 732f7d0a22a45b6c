"""On a torch whose inside is another one nothing is promised, and that is said before any death."""

from __future__ import annotations

import pytest
from support.jobs import WORKERS, Launcher
from support.training_kinds import Run, msrun_of, run

from msrun.drill.fault_options import read_words
from msrun.trials.history import read
from worker_hooks.drill.plan import DrillPlan

pytestmark = [pytest.mark.torch, pytest.mark.warm]
OTHER = WORKERS / "other_torch.py"
NOTHING = "no rank is replaced and no step is saved"
WATCHED = (
    "torch's NCCL watchdog may end the others before their state is saved: a reason; what helps"
)


def killed(launcher: Launcher, how: str) -> Run:
    folder = launcher.tmp / how
    faults = read_words("rank=1,step=9,phase=forward", "kill").faults
    plan = DrillPlan(str(folder / "traces"), str(folder / "ckpt"), faults)
    words = msrun_of(launcher, "--worker_num=2", "--max-restarts=1", OTHER, how, "--steps=12")
    prelude = 'mkdir traces ckpt && exec "$@"'
    return run(launcher, folder, "sh", "-c", prelude, "sh", *words, MSRUN_DRILL=plan.encode())


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("lacks", "lacks torch.distributed.distributed_c10d._get_default_store: no rank"),
        ("lays out", "(this torch lays them out by another rule)"),
    ],
)
def test_nothing_is_replaced_or_saved_and_all_begin_again(
    how: str, why: str, launcher: Launcher
) -> None:
    done = killed(launcher, how)
    assert done.ended.code == 0, done.ended.out
    before, after = done.ended.out.split("restart 1 of 1", maxsplit=1)
    (line,) = [each for each in before.splitlines() if NOTHING in each]
    assert line.startswith("msrun: ") and why in line
    assert "no rank holds it whole: rank 0 cannot save it" in after
    history = read(done.folder)
    assert len(history.strikes) == 1
    assert history.dumps == ()
    assert not [each for each in history.events if each["event"] == "ReplaceRanks"]


@pytest.mark.parametrize(("how", "said"), [("lacks", NOTHING), ("watches", WATCHED)])
def test_a_strict_run_is_refused(how: str, said: str, launcher: Launcher) -> None:
    words = msrun_of(launcher, "--worker_num=2", "--strict", OTHER, how, "--steps=12")
    done = run(launcher, launcher.tmp / f"strict {how}", *words)
    assert done.ended.code == 2, done.ended.out
    assert said in done.ended.out
    assert "trained to step" not in done.ended.out


def test_a_watchdog_that_may_be_faster_is_spoken_of_once_and_training_is_protected(
    launcher: Launcher,
) -> None:
    done = killed(launcher, "watches")
    assert done.ended.code == 0, done.ended.out
    assert done.ended.out.count(WATCHED) == 1
    assert done.ended.out.index(WATCHED) < done.ended.out.index("was killed by SIGKILL")
    history = read(done.folder)
    assert [each for each in history.events if each["event"] == "ReplaceRanks"]
