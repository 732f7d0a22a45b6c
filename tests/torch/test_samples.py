"""The samples and the bench that needs torch, as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.jobs import DEADLINE_S
from support.warm_python import WarmPython

from worker_hooks.storage import manifest, safetensors_file

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = pytest.mark.torch


def ran(
    python: WarmPython, script: str, *words: str, cwd: Path
) -> subprocess.CompletedProcess[str]:
    told = {name: value for name, value in os.environ.items() if not name.startswith("MSRUN_")}
    command = [*python.words, SCRIPTS / script, *words]
    return subprocess.run(
        command, cwd=cwd, env=told, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )


def test_power_off_sample_learns_under_plain_python(tmp_path, warm_python):
    ended = ran(warm_python, "samples/power_off/train.py", "--epochs=3", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    *epochs, last = ended.stdout.splitlines()
    assert [line.split()[1] for line in epochs] == ["1/3", "2/3", "3/3"]
    right, _, tested = last.partition("(")[2].partition(")")[0].partition(" of ")
    assert int(right) > 0.7 * int(tested)  # by chance it would be a tenth
    assert ended.stderr.count("this run is not protected") == 1
    assert not list(tmp_path.iterdir())  # nobody died, nothing is saved


def test_graceful_exit_sample_leaves_and_goes_on(tmp_path):
    launcher = tmp_path / "bin" / "msrun"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m msrun "$@"\n')
    launcher.chmod(0o755)
    told = {name: value for name, value in os.environ.items() if not name.startswith("MSRUN_")}
    told |= {
        "PATH": f"{launcher.parent}:{told['PATH']}",
        "PYTHONPATH": str(SCRIPTS.parent),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "WORKER_NUM": "3",
    }
    here = tmp_path / "here"
    here.mkdir()
    (here / "graceful_exit_log").mkdir()
    (here / "graceful_exit_log" / "worker_0.log").write_text("step: 5, loss of an earlier run\n")
    command = [SCRIPTS / "samples/graceful_exit/train.sh", "--epoch_num=2", "--image_num=3840"]
    ended = subprocess.run(
        command, cwd=here, env=told, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert said.count("Graceful exit is triggered, stop training.") == 3
    assert said[-1] == "trained to the end, step 80"
    assert "graceful_exit.json asks for it, every rank exited with 0" in ended.stderr
    assert (here / "graceful_exit.json").read_text() == '{"GracefulExit": 0}\n'
    (saved,) = (here / "graceful_exit_checkpoints").iterdir()
    left_at = manifest.read(saved).step
    assert 5 <= left_at < 80
    for rank in range(3):
        folder = here / f"rank_{rank}"
        header = safetensors_file.read_header(folder / "LeNet_train.safetensors")
        assert header.metadata["global_step"] == str(left_at)
        program = torch.export.load(folder / "LeNet_train.pt2").module()
        assert program(torch.zeros(32, 1, 32, 32)).shape == (32, 10)


def test_overhead_is_measured(tmp_path, warm_python):
    words = ("--steps=40", "--step-ms=0.2", "--json=found.json")
    ended = ran(warm_python, "benchmarks/overhead.py", *words, cwd=tmp_path)
    assert ended.returncode in {0, 1}, ended.stderr  # so short a step may well miss the goals
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["plain_s"]) == len(found["guarded_s"]) == 36  # 2 of each turn do not count
    assert found["ratio"] > 0.5
    assert found["commit_us"] > 0


def test_overhead_refuses_what_cannot_be_measured(tmp_path, warm_python):
    ended = ran(warm_python, "benchmarks/overhead.py", "--step-ms=0", cwd=tmp_path)
    assert ended.returncode == 2
    assert "--step-ms above 0" in ended.stderr


def test_the_transformer_that_is_cut_over_ranks_outlives_one_of_them(tmp_path, warm_python):
    script = str(SCRIPTS / "samples/hsdp_transformer/train.py")
    told = {name: value for name, value in os.environ.items() if not name.startswith("MSRUN_")}
    told |= {"PYTHONPATH": str(SCRIPTS.parent), "XDG_STATE_HOME": str(tmp_path / "state")}
    job = ("--worker_num=4", script, "--epochs=1")
    command = [*warm_python.words, "-m", "msrun", "drill", "--kill", "rank=1,step=20", "--", *job]
    ended = subprocess.run(
        command, cwd=tmp_path, env=told, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (row,) = [line for line in ended.stdout.splitlines() if line.startswith("kill -9 rank 1")]
    assert row.endswith("1 replaced  yes            nothing lost"), ended.stdout
