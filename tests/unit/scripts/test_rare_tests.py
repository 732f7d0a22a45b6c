"""What the usual run of the tests leaves out: tests/rare.txt names what there is."""

import os
import shutil
import subprocess

import pytest
from support.jobs import ROOT


def test_every_function_that_is_named_exists():
    lines = (ROOT / "tests/rare.txt").read_text().splitlines()
    rows = [line.split(" ") for line in lines if line and not line.startswith("#")]
    assert len({place for _, place in rows}) == len(rows) > 30
    for every, place in rows:
        file, _, function = place.partition("::")
        assert int(every) != 1, place
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), place


def collected(tmp_path, *words):
    """The arguments that `scripts/test` gives to pytest, which are not run."""
    scripts = tmp_path / "scripts"
    (tmp_path / "venv/bin").mkdir(parents=True)
    scripts.mkdir()
    shutil.copy(ROOT / "scripts/test", scripts)
    says = '#!/bin/sh\n[ "$2" = pip ] || printf "%s\\n" "$@"\n'
    for file, text in (
        (scripts / "install", f"#!/bin/sh\necho {tmp_path}/venv\n"),
        (tmp_path / "venv/bin/python", says),
        (tmp_path / "venv/bin/prterun", ""),
        (tmp_path / "venv/bin/id", "#!/bin/sh\necho 1000\n"),  # nothing is installed
    ):
        file.write_text(text)
        file.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}"}
    env["MSRUN_TEST_WORKERS"] = "1"
    run = subprocess.run(
        [scripts / "test", *words], env=env, capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()


NOT_ENGINES, ENGINES = "--ignore=tests/engines", "tests/engines"


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (("engines",), [ENGINES]),
        (("engines", "--all"), [ENGINES, "-m", ""]),
        (("engines", "--all", "-x"), [ENGINES, "-m", "", "-x"]),
        (("engines", "-k", "slurm"), [ENGINES, "-k", "slurm"]),
        (("all", "-x"), ["-m", "", NOT_ENGINES, "-x"]),
        (("nodes",), ["-m", "", "tests/nodes"]),
        ((), [NOT_ENGINES]),
    ],
)
def test_which_command_runs_the_rare_ones(tmp_path, words, more):
    """Of two words about marks, pytest takes the last."""
    usual = ["-m", "pytest", "-m", "not rare", "-n", "1"]
    assert collected(tmp_path, *words) == [*usual, *more]


def test_the_rare_ones_of_the_engines_have_a_command_that_is_named():
    told = (ROOT / "CONTRIBUTING.md").read_text()
    assert "\nscripts/test all " in told
    assert "\nscripts/test engines --all " in told
