"""Meshes of up to three dimensions and torch's own pipelines: what a rank's death costs, to bitwise the same weights."""

from __future__ import annotations

import pytest
from support.jobs import WORKERS, Launcher
from support.warm_python import WarmPython

from msrun.drill.fault_options import read_words
from worker_hooks.drill.plan import DrillPlan

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCRIPT = WORKERS / "train_mesh.py"
STEPS = 14


HELD_TWICE = [("pipeline", 4), ("3d", 8), ("tp_replicate", 4)]


@pytest.mark.parametrize(
    ("style", "ranks"), [*HELD_TWICE, ("pipeline", 2), ("tp", 2), ("tp_fsdp", 4)]
)
def test_a_rank_that_dies_costs_what_was_said(
    launcher: Launcher, warm_python: WarmPython, style: str, ranks: int
) -> None:
    """A new rank's schedule finds out shapes at its first step, and all others with it."""
    name = f"{style}-{ranks}"
    alone, folder = launcher.tmp / f"alone-{name}", launcher.tmp / name
    warm_python.train(alone, ranks, SCRIPT, style, STEPS)
    (folder / "traces").mkdir(parents=True)
    struck = read_words("rank=1,step=8,phase=backward", "kill").faults
    if style == "pipeline":  # whose backward is the schedule's own
        struck = read_words("rank=1,step=8,delay=0.5", "kill").faults
    job = launcher.start(
        *(f"--worker_num={ranks}", "--max-restarts=2", SCRIPT, style, STEPS, "--pause=0.1"),
        log_dir=folder / "logs",
        cwd=folder,
        XDG_STATE_HOME=str(folder / "state"),
        MSRUN_DRILL=DrillPlan(str(folder / "traces"), "", struck).encode(),
    )
    ended = job.wait()
    assert ended.code == 0, ended
    assert bool(job.seen("ReplaceRanks")) == ((style, ranks) in HELD_TWICE)
    for rank in range(ranks):
        file = f"{style}.{rank}.sha"
        assert (folder / file).read_text() == (alone / file).read_text()
