"""The sample of model saving, and the bench of what a save costs, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.jobs import DEADLINE_S, ROOT
from support.warm_python import WarmPython

from worker_hooks.storage.find import candidates
from worker_hooks.storage.manifest import Manifest, verify

SCRIPTS = ROOT / "scripts"
pytestmark = pytest.mark.torch


def ran(
    python: WarmPython, script: str, *words: str, cwd: Path
) -> subprocess.CompletedProcess[str]:
    told = {name: value for name, value in os.environ.items() if not name.startswith("MSRUN_")}
    return subprocess.run(
        [*python.words, SCRIPTS / script, *words],
        cwd=cwd,
        env=told | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def saved(folder: Path) -> dict[str, int]:
    """The complete checkpoints and their steps; whole, too."""
    found = {path: one for path, one in candidates(folder) if isinstance(one, Manifest)}
    assert all(verify(path, one) == [] for path, one in found.items())
    return {path.name: one.step for path, one in found.items()}


def test_the_sample_saves_and_goes_on_under_plain_python(tmp_path, warm_python):
    script = "samples/model_saving/train_saving.py"
    ended = ran(warm_python, script, "--epoch_num=1", "--async_save=1", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    folder = tmp_path / "src_checkpoints"
    assert saved(folder) == {"checkpoint-1_64": 64, "checkpoint-1_60": 60}
    ended = ran(
        warm_python, script, "--epoch_num=2", "--is_recover=1", "--integrated_save=0", cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert "epoch: 2 step: 64" in ended.stdout and "epoch: 1 " not in ended.stdout
    assert saved(folder) == {"checkpoint-2_64": 128, "checkpoint-2_60": 124}


def test_what_a_save_costs_is_measured(tmp_path, warm_python):
    words = ("--mb=1", "--runs=1", "--json=found.json", "--folder=.")
    ended = ran(warm_python, "benchmarks/save.py", *words, cwd=tmp_path)
    assert ended.returncode in {0, 1}, ended.stderr  # so small a state may well miss the goals
    found = json.loads((tmp_path / "found.json").read_text())
    sizes = {way: one["nbytes"] for way, one in found["ways"].items()}
    assert len(sizes) == 4
    assert max(sizes.values()) < 1.1 * min(sizes.values())
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
