"""A layer and a group that a script adds in training: nothing is lost, or it is said before."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs import WORKERS, Launcher
from support.training_kinds import Run, msrun_of, run

from msrun.drill.fault_options import read_words
from msrun.trials.history import read
from msrun.trials.verdict import steps_lost
from worker_hooks.drill.plan import DrillPlan
from worker_hooks.recovery.resume import NOT_AGAIN
from worker_hooks.script.notice import RESHAPED

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCRIPT = WORKERS / "adds_group.py"
# before it is added, when it is known what a step changes; as it is added, for all but the dead rank; where it is added; later
FAULTS = tuple(
    f"rank={number % 2},step={step},phase={phase}"
    for number, (step, phase) in enumerate(
        [(3, "update"), (4, "commit"), (6, "forward"), (10, "update")]
    )
)


def job(launcher: Launcher, name: str, how: str, *faults: str) -> Run:
    folder = launcher.tmp / name
    words = msrun_of(
        launcher, "--worker_num=2", f"--max-restarts={len(faults)}", SCRIPT, "out", how
    )
    plan = DrillPlan(str(folder / "traces"), str(folder / "ckpt"), ())
    if faults:
        plan = plan._replace(faults=read_words("+".join(faults), "kill").faults)
    prelude = 'mkdir out traces ckpt && exec "$@"'
    return run(launcher, folder, "sh", "-c", prelude, "sh", *words, MSRUN_DRILL=plan.encode())


def results(folder: Path) -> list[str]:
    return [(folder / "out" / str(rank)).read_text() for rank in range(2)]


def test_what_is_added_in_training_is_saved_and_put_back_where_it_is_added_again(
    launcher: Launcher,
) -> None:
    plain = job(launcher, "plain", "again")
    assert plain.ended.code == 0, plain.ended.out
    killed = job(launcher, "killed", "again", *FAULTS)
    assert killed.ended.code == 0, killed.ended.out
    history = read(killed.folder)
    assert len(history.strikes) == len(FAULTS)
    assert steps_lost(history) == 0
    assert results(killed.folder) == results(plain.folder)
    # entered again, the training function would add it twice: then all ranks are restarted
    replaced = [event["step"] for event in history.events if event["event"] == "ReplaceRanks"]
    assert 3 in replaced or 2 in replaced
    assert max(replaced) <= 4


def test_who_does_not_add_it_again_is_told_before_and_refused(launcher: Launcher) -> None:
    killed = job(launcher, "once", "once", FAULTS[-1])
    assert killed.ended.code == 1, killed.ended.out
    said, died, refused = map(
        killed.ended.out.find, (RESHAPED.format("model, optimizer"), "was killed by", NOT_AGAIN)
    )
    assert 0 <= said < died < refused
    assert not list((killed.folder / "out").iterdir())
