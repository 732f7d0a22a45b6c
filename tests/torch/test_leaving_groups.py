"""A rank that waits in a collective for a peer that never comes is freed, and meets the others."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from worker_hooks import groups

SCRIPT = Path(__file__).parents[1] / "workers" / "leave_group.py"


def test_a_rank_tells_why_it_could_not_join_others():
    script = SCRIPT.with_name("fixed_groups.py")
    environ = {"PYTHONPATH": str(SCRIPT.parents[2]), "PATH": os.environ["PATH"]}
    words = [sys.executable, str(script)]
    done = subprocess.run(words, capture_output=True, env=environ, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == {
        "none": "",
        "store": groups.STORE,
        "plain": "",
        "groups": groups.GROUPS,
        "early": groups.EARLY,
        "wrapped": groups.WRAPPED,
    }


def test_ranks_leave_a_broken_group_and_make_a_new_one():
    job = subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(SCRIPT.parents[2]), "PATH": os.environ["PATH"]},
        start_new_session=True,
    )
    try:
        out, err = job.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    assert len(told) == 3
    for each in told:
        assert each["freed_s"] < 5  # torch's own time-out is half an hour
        assert each["echo"] == "?"  # a connection that is no rank's still answers
        assert each["total"] == 3
        assert each["threads"][1] <= each["threads"][0]
