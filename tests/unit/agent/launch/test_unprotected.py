"""What is said of a script before it runs: nothing that its sources do not show."""

import sys

import pytest

from agent.launch import warm_imports
from agent.launch.unprotected import unprotected
from agent.spec.job_spec import JobSpec, Program, ProgramKind, ProtectMode

PLAIN = "import torch\nimport torch.distributed as dist\n"
SAYS = "train.py has no TrainState: if a rank dies, the job ends. To protect it: msrun help protect"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    warm_imports.look.cache_clear()
    return tmp_path


def said(folder, files, name="train.py", kind=ProgramKind.SCRIPT, restarts=0, **job):
    files = {"train.py": files} if isinstance(files, str) else files
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    program = Program(name, (), kind, sys.executable)
    spec = JobSpec(program, 2, run_id="job", record_id="rec", max_restarts=restarts, **job)
    return unprotected(spec)


def test_a_training_without_train_state_is_not_protected(folder):
    assert said(folder, PLAIN) == SAYS
    assert "all ranks begin anew" in said(folder, PLAIN, restarts=3)


@pytest.mark.parametrize(
    "files",
    [
        f"{PLAIN}from msrun import TrainState, run",
        f"{PLAIN}import worker_hooks",
        {"train.py": f"{PLAIN}import loop", "loop.py": "from msrun import TrainState"},
        {"train.py": f"{PLAIN}from . import loop", "loop.py": "from msrun import TrainState"},
        f"{PLAIN}def main():\n    from msrun import run",
        f"{PLAIN}from our_company_trainer import fit",  # who knows what that does
        "print('no training')",
        "this is no Python",
    ],
)
def test_of_others_nothing_is_said_before_the_job_shows_it(folder, files):
    assert said(folder, files) == ""


def test_what_is_asked_for_is_said(folder):
    off, auto, shadow = ProtectMode.OFF, ProtectMode.AUTO, ProtectMode.SHADOW
    ends = "--protect=off: if a rank dies, the job ends"
    assert said(folder, f"{PLAIN}import worker_hooks", protect=off) == ends
    assert said(folder, PLAIN, protect=off, restarts=1).endswith("all ranks begin anew")
    assert not said(folder, PLAIN, protect=auto)  # the running job shows it
    assert "needs a Python script" in said(
        folder, PLAIN, "./a", ProgramKind.PROGRAM, protect=shadow
    )


def test_packages_that_are_known_and_files_beside_the_script_hide_nothing(folder):
    files = {"train.py": f"{PLAIN}import numpy, tqdm, helpers.data", "helpers/data.py": "x = 1"}
    assert said(folder, files) == SAYS


def test_of_a_program_that_is_no_python_nothing_is_known(folder):
    assert said(folder, PLAIN, "./train.sh", ProgramKind.PROGRAM) == ""
