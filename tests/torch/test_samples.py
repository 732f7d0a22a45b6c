"""The samples and the bench that needs torch, as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = pytest.mark.torch


def python(script: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    told = {name: value for name, value in os.environ.items() if not name.startswith("MSRUN_")}
    command = [sys.executable, SCRIPTS / script, *words]
    return subprocess.run(
        command, cwd=cwd, env=told, capture_output=True, text=True, check=False, timeout=100
    )


def test_power_off_sample_learns_under_plain_python(tmp_path):
    ended = python("samples/power_off/train.py", "--epochs=3", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    *epochs, last = ended.stdout.splitlines()
    assert [line.split()[1] for line in epochs] == ["1/3", "2/3", "3/3"]
    right, _, tested = last.partition("(")[2].partition(")")[0].partition(" of ")
    assert int(right) > 0.7 * int(tested)  # by chance it would be a tenth
    assert ended.stderr.count("nothing guards this run") == 1
    assert not list(tmp_path.iterdir())  # nobody died, nothing is saved


def test_overhead_is_measured(tmp_path):
    words = ("--steps=40", "--step-ms=0.2", "--json=found.json")
    ended = python("benchmarks/overhead.py", *words, cwd=tmp_path)
    assert ended.returncode in {0, 1}, ended.stderr  # so short a step may well miss the goals
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["plain_s"]) == len(found["guarded_s"]) == 40
    assert found["ratio"] > 0.5
    assert found["commit_us"] > 0


def test_overhead_refuses_what_cannot_be_measured(tmp_path):
    ended = python("benchmarks/overhead.py", "--step-ms=0", cwd=tmp_path)
    assert ended.returncode == 2
    assert "--step-ms above 0" in ended.stderr
