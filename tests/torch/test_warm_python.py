"""What the tests themselves rest on: a program of `support.warm_python` ends as Python would end it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.jobs import poll
from support.warm_python import WarmPython

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("import sys, torch; print(sys.argv[1:], input()); sys.exit(7)", 7, "['a', 'b'] line\n"),
        ("print(1 / 0)", 1, ""),
        ("print('so far', flush=True); import os; os.kill(os.getpid(), 9)", -9, "so far\n"),
        ("import atexit; atexit.register(print, 'at exit')", 0, "at exit\n"),
        ("import os; print(os.getcwd() == os.environ['HERE'])", 0, "True\n"),
    ],
)
def test_it_ends_as_the_program_ends(
    warm_python: WarmPython, tmp_path: Path, code: str, exit_code: int, said: str
) -> None:
    done = subprocess.run(
        [*warm_python.words, "-c", code, "a", "b"],
        input="line\n",
        cwd=tmp_path,
        env={**os.environ, "HERE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (exit_code, said)
    assert ("ZeroDivisionError" in done.stderr) == (exit_code == 1)


def test_a_program_ends_with_its_client(warm_python: WarmPython) -> None:
    words = [*warm_python.words, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]  # fmt: skip
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        assert pid != client.pid
        client.kill()
    poll(lambda: not Path(f"/proc/{pid}").exists())


def test_a_rank_that_fails_fails_the_training(warm_python: WarmPython, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, sys; print('rank', os.environ['RANK']); sys.exit(os.environ['RANK'] == '1')")  # fmt: skip
    with pytest.raises(AssertionError, match="rank 1"):
        warm_python.train(tmp_path / "folder", 2, script)
