"""What the tests themselves rest on: a program of `support.warm_python` ends as Python would end it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.jobs import Launcher, marked, poll
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


SCRIPT = """
import atexit, os, sys
import torch
print("args", sys.argv, __name__, os.path.basename(__file__), sys.path[0] == os.path.dirname(__file__))
print("rank", os.environ["RANK"], flush=True)
kept = open("kept." + os.environ["RANK"], "w")
kept.write("flushed when the interpreter tears down this module")
atexit.register(print, "at exit")
if sys.argv[1] == "fail":
    raise ValueError("no luck")
"""


@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "started"])
@pytest.mark.parametrize("word", ["go", "fail"])
def test_a_warm_job_is_like_one_that_was_started(
    msrun: Launcher, warm_python: WarmPython, word: str, is_warm: bool
) -> None:
    (msrun.tmp / "script.py").write_text(SCRIPT)
    msrun.python = warm_python.words if is_warm else msrun.python
    job = msrun.start("--worker_num=2", "script.py", word)
    ended = job.wait()
    assert ended.code == (word == "fail"), ended
    logs = job.logs()
    for rank in "01":
        said = logs[f"worker_{rank}.log"]
        if word == "fail" and "ValueError" not in said:
            continue  # it was stopped, perhaps before it said anything
        assert f"args ['script.py', '{word}'] __main__ script.py True" in said
        assert (f"rank {rank}" in said, "at exit" in said) == (True, True) or word == "fail"
        if word == "go":
            assert (msrun.tmp / f"kept.{rank}").read_text().startswith("flushed")
    if word == "fail":
        (failed, *_) = [log for log in logs.values() if "ValueError" in log]
        first, *_ = failed[failed.index("Traceback") :].splitlines()[1:]
        assert first.endswith('script.py", line 10, in <module>'), failed


def test_the_processes_of_a_warm_job_have_its_environment_and_end_with_it(
    msrun: Launcher, warm_python: WarmPython
) -> None:
    (msrun.tmp / "script.py").write_text("import torch, time; print('on', flush=True); time.sleep(600)")  # fmt: skip
    msrun.python = warm_python.words
    job = msrun.start("--worker_num=2", "script.py")
    job.await_lines("on", 2)
    assert {job.pid, job.forkserver(), *job.pids().values()} <= marked(msrun.mark).keys()
    assert job.process.pid not in marked(msrun.mark)
    os.kill(job.pid, 9)
    assert job.wait().code == -9
    poll(lambda: not marked(msrun.mark))
