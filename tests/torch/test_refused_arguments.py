"""A script that refuses what msrun appends is not started for ever, and the report names the cause."""

from __future__ import annotations

import os
import signal

import pytest
from support.jobs import WORKERS, Launcher

pytestmark = [pytest.mark.torch, pytest.mark.warm]


def test_an_argument_that_newcomers_refuse_is_named(msrun: Launcher) -> None:
    words = ("--worker_num=2", "--max-restarts=1", "--recover_arg=--nonsense")
    job = msrun.start(*words, WORKERS / "train_small.py", "--epochs=9999", "--pause=0.02", "--say")
    job.await_lines("step 3\n", 2)
    os.kill(job.pids()[1], signal.SIGKILL)
    ended = job.wait()
    assert ended.code == 1, ended.err
    refusal = "train_small.py: error: unrecognized arguments: --nonsense"
    assert [one["error"] for one in job.events() if one["event"] == "WorkerExited"][1:3] == [
        refusal
    ] * 2
    assert len([one for one in job.events() if one["event"] == "ReplaceRanks"]) == 2
    assert f"(exited with code 2: {refusal}): the state is saved before a restart" in ended.err
    assert "not replaced, the same failure twice at step " in ended.err
    hint = "msrun appended --nonsense to the script's arguments because the rank resumes"
    assert f"  hint: {hint} (--recover-arg= leaves it out)" in ended.err
    assert ended.err.splitlines()[-1] == "msrun: to resume: msrun --resume"
