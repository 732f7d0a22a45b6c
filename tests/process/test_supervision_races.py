"""What an unlucky moment once broke: stuck and killed helpers, a stop beside a failure, many ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from support.jobs import WORKERS, Launcher, poll

from agent.spec.job_spec import Timeouts

INHERITED = 1050  # more than select() can hold
RANKS = 600


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("end", ["a second signal", "the grace"])
def test_a_stuck_forkserver_cannot_hold_up_a_stop(msrun: Launcher, end: str) -> None:
    grace = "--shutdown-timeout=600" if end == "a second signal" else "--shutdown-timeout=1"
    job = msrun.start("--nproc-per-node=2", "--max-restarts=1", grace, WORKERS / "wait.py")
    job.await_lines("ready", 2)
    job.await_state("running")
    os.kill(job.forkserver(), signal.SIGSTOP)
    os.kill(job.pids()[1], signal.SIGKILL)
    poll(lambda: job.status()["attempt"] == 1 and job.status()["state"] == "starting")
    began = time.monotonic()
    job.signal(signal.SIGINT)
    job.await_state("stopping")
    if end == "a second signal":
        job.signal(signal.SIGINT)
    ended = job.wait()
    assert ended.code == 130, ended
    assert time.monotonic() - began < Timeouts().grace_s
    assert "Traceback" not in ended.err
    assert not msrun.marked()


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_stopped_forkserver_does_not_outlive_a_killed_msrun(msrun: Launcher, how: str) -> None:
    words = ("--nproc-per-node=2", f"--start-method={how}", WORKERS / "wait.py")
    job = msrun.start(*words)
    job.await_lines("ready", 2)
    os.kill(job.forkserver(), signal.SIGSTOP)
    job.signal(signal.SIGKILL)
    job.wait()
    poll(lambda: not msrun.marked())


def test_a_failure_is_reported_though_ctrl_c_came_during_the_grace(msrun: Launcher) -> None:
    job = msrun.start(
        "--nproc-per-node=2", "--shutdown-timeout=600", WORKERS / "fails_beside_deaf.py"
    )
    job.await_state("stopping")
    job.signal(signal.SIGINT)
    job.await_seen("StopRequested")
    job.signal(signal.SIGINT)
    ended = job.wait()
    assert ended.code == 130, ended
    assert "msrun: rank 1 on " in ended.err
    assert "ValueError: the real root cause" in ended.err
    assert "the real root cause" in json.dumps(
        json.loads((job.folder / "failure.json").read_bytes())
    )


def test_a_user_signal_is_for_the_rank_and_not_for_its_programs(msrun: Launcher) -> None:
    job = msrun.start("--nproc-per-node=2", WORKERS / "helper.py")
    job.await_lines("ready", 2)
    job.signal(signal.SIGUSR1)
    job.await_lines("helper died of", 2)
    assert sum(log.count("helper died of SIGTERM") for log in job.logs().values()) == 2
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_kill_of_msrun_ends_children_with_an_environment_of_their_own(
    msrun: Launcher, restarts: int
) -> None:
    job = msrun.start(
        "--nproc-per-node=2", f"--max-restarts={restarts}", WORKERS / "stranger.py", restarts
    )
    job.await_lines("stranger ", 2)
    logs = (job.folder / f"worker_{rank}.log" for rank in range(2))
    strangers = [int(log.read_text().split()[1]) for log in logs]
    try:
        assert all(map(lives, strangers))
        assert not set(strangers) & set(msrun.marked())
        job.signal(signal.SIGKILL)
        poll(lambda: not any(map(lives, strangers)), within_s=Timeouts().grace_s)
    finally:
        for pid in strangers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_hundreds_of_ranks_start_and_end(msrun: Launcher) -> None:
    job = msrun.start(f"--nproc-per-node={RANKS}", "--no-python", "sleep", "0.2")
    ended = job.wait()
    assert (ended.code, ended.err) == (0, "")
    assert [worker["exit_code"] for worker in job.status()["workers"]] == [0] * RANKS
    assert len(job.seen("WorkerStarted")) == len(job.seen("WorkerExited")) == RANKS


def test_more_than_a_thousand_inherited_descriptors_do_no_harm(msrun: Launcher) -> None:
    """Above 1023 no descriptor fits into select(): leftovers have to be awaited in another way."""
    done = msrun.run_with_descriptors(INHERITED, WORKERS / "family.py", "exit")
    assert (done.returncode, done.stderr) == (0, b"")
    assert not msrun.marked()


@pytest.mark.parametrize("runs", [1, 2])
def test_a_user_s_own_errors_folder_stays_where_it_is(msrun: Launcher, runs: int) -> None:
    own = msrun.tmp / "errors" / "mine.txt"
    own.parent.mkdir()
    own.write_text("mine")
    for _ in range(runs):
        assert msrun.run("--log_dir=.", WORKERS / "leave.py", "rest=0").code == 0
    assert own.read_text() == "mine"
