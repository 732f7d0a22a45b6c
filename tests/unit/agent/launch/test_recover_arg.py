"""Which argument tells a script that it resumes: only one that its own sources name."""

import sys

import pytest

from agent.launch import warm_imports
from agent.launch.recover_arg import decided
from agent.spec.job_spec import DumpSpec, JobSpec, Program, ProgramKind

ADDS = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--is_recover')"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def argument(folder, files, name="train.py", *args, kind=ProgramKind.SCRIPT, given=None):
    """What is appended for a job whose files are ``files``; a lone string is ``train.py``."""
    files = {"train.py": files} if isinstance(files, str) else files
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)
    warm_imports.look.cache_clear()
    program = Program(name, args, kind, sys.executable)
    job = JobSpec(program, 2, run_id="job", record_id="rec", dump=DumpSpec(recover_arg=given))
    return decided(job).dump.recover_arg


@pytest.mark.parametrize(
    "text",
    [
        ADDS,
        "import sys\nif '--is_recover=1' in sys.argv: print('resumed')",
        "class Arguments:\n    is_recover: int = 0",
        "def main(lr=1, is_recover=0): ...",
        "is_recover = 0\nexec(open('configurator.py').read())",
        "print(options.is_recover)",
    ],
)
def test_a_script_that_names_it_is_told(folder, text):
    assert argument(folder, text) == "--is_recover=1"


@pytest.mark.parametrize(
    "text",
    [
        "import argparse\nargparse.ArgumentParser().parse_args()",
        "# msrun may add --is_recover=1",
        '"""Knows nothing of --is_recover."""',
        "def main():\n    '''Without is_recover.'''",
        "TrainState(model=net, is_recover=True)",
        "recover = 1",
        "not python: is_recover",
    ],
)
def test_a_script_that_does_not_is_left_alone(folder, text):
    assert argument(folder, text) == ""


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"train.py": "import options", "options.py": ADDS}, True),
        ({"train.py": "import a", "a.py": "from pkg import b", "pkg/b.py": ADDS}, True),
        ({"train.py": "import a", "other.py": ADDS}, False),
        ({"train.py": "import a", "elsewhere/a.py": ADDS}, False),
    ],
)
def test_what_the_script_imports_from_beside_it_counts(folder, files, told):
    assert bool(argument(folder, files)) is told


def test_only_so_many_modules_are_looked_at(folder, monkeypatch):
    monkeypatch.setattr(warm_imports, "MAX_FILES", 3)
    chain = {f"m{i}.py": f"import m{i + 1}" for i in range(9)}
    assert argument(folder, {"train.py": "import m0", **chain, "m9.py": ADDS}) == ""


@pytest.mark.parametrize(
    ("kind", "name", "files"),
    [
        (ProgramKind.MODULE, "pkg.train", {"pkg/train.py": ADDS}),
        (ProgramKind.MODULE, "pkg", {"pkg/__main__.py": "from . import cli", "pkg/cli.py": ADDS}),
        (ProgramKind.RUN_PATH, "jobs/train.py", {"jobs/train.py": ADDS}),
        (ProgramKind.SCRIPT, "jobs", {"jobs/__main__.py": ADDS}),
        (ProgramKind.PROGRAM, "./run.sh", {"run.sh": '#!/bin/sh\nset -- "$@" is_recover\n'}),
        (ProgramKind.PROGRAM, "./train.py", {"train.py": f"#!/usr/bin/env python\n{ADDS}"}),
    ],
)
def test_every_kind_of_program_is_looked_at(folder, kind, name, files):
    assert argument(folder, files, name, kind=kind) == "--is_recover=1"


def test_the_script_of_a_python_that_is_named_is_looked_at(folder):
    told = argument(folder, ADDS, sys.executable, "-u", "train.py", kind=ProgramKind.PROGRAM)
    assert told == "--is_recover=1"


@pytest.mark.parametrize("text", ["#!/bin/sh\n# is_recover\ntrue", "\0ELF is_recover", ""])
def test_a_program_that_does_not_name_it_is_left_alone(folder, text):
    assert argument(folder, {"run": text}, "./run", kind=ProgramKind.PROGRAM) == ""


def test_a_program_that_is_not_there_is_the_start_s_problem(folder):
    assert argument(folder, {}, "nowhere", kind=ProgramKind.PROGRAM) == ""
    assert argument(folder, {}, "nowhere.py") == ""
    assert argument(folder, {}, "train_${local_rank}.py") == ""


@pytest.mark.parametrize("text", [ADDS, "pass"])
@pytest.mark.parametrize("given", ["", "--go"])
def test_what_the_user_gave_holds_in_both_ways(folder, text, given):
    assert argument(folder, text, given=given) == given
