"""Ranks that are alive without progress, found by real looks at real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import WORKERS, Job, Launcher, poll

FREEZER = Path("/sys/fs/cgroup/freezer")


def start(msrun: Launcher, *how: str, options: tuple = ()) -> Job:
    """Three ranks that committed five steps, and a timer that looks at them."""
    (msrun.tmp / "ckpt").mkdir()
    job = msrun.start("--nproc-per-node=3", *options, WORKERS / "guarded.py", "ckpt", *how)
    poll(
        lambda: (
            [worker.get("step_p95_s") is not None for worker in job.status()["workers"]]
            == [True] * 3
        )
    )
    return job


def the(job: Job, event: str) -> dict:
    (one,) = [one for one in job.events() if one["event"] == event]
    return one


def test_a_rank_that_is_stopped_is_killed_soon_and_the_step_is_saved(msrun: Launcher) -> None:
    job = start(msrun, "all=trains")
    os.kill(job.pids()[1], signal.SIGSTOP)
    stopped = time.time()
    ended = job.wait()
    hung = the(job, "RankHung")
    assert hung["rank"] == 1
    assert hung["why"].startswith("made no progress for ")
    assert " in forward of step 6 (stopped by a signal; the limit is 1.5 s, as" in hung["why"]
    assert 1.0 < hung["time"] - stopped < 3.0
    # from its last progress, which may have been long before on a machine at load
    assert 1.0 < hung["silent_s"] <= hung["time"] - stopped + 2.0
    incident = the(job, "IncidentOver")
    assert incident["at"] == pytest.approx(hung["time"] - hung["silent_s"], abs=0.05)
    assert (incident["kind"], incident["answer"]) == ("hung", "saved")
    assert incident["lost_s"] > hung["silent_s"]
    judged = the(job, "HangJudged")
    assert (judged["culprits"], judged["victims"], judged["unanswered"]) == ([1], [0, 2], [1])
    assert judged["stacks"] == {"0": ["train.py:9 f"], "2": ["train.py:9 f"]}
    assert (msrun.tmp / "ckpt" / "tft_saved_checkpoints-step_5").is_dir()
    assert re.search(r"rank 1 .* made no progress for .*; msrun killed it\n", ended.err)


def test_who_stands_in_no_collective_is_the_culprit(msrun: Launcher) -> None:
    job = start(msrun, "all=trains", "2=stuck", options=("--hang_timeout=1",))
    job.wait()
    assert the(job, "HangJudged")["victims"] == [0, 1]
    assert the(job, "RankHung")["rank"] == 2
    assert the(job, "RankHung")["why"].endswith(
        "the limit is 1 s, --hang-timeout=1); it stands at train.py:9 f"
    )


def test_a_job_that_is_stopped_as_a_whole_is_left_alone(msrun: Launcher) -> None:
    job = start(msrun, "all=trains", options=("--hang_timeout=1",))
    for pid in job.pids().values():
        os.kill(pid, signal.SIGSTOP)
    poll(lambda: "JobPaused" in {one["event"] for one in job.events()})
    for pid in job.pids().values():
        os.kill(pid, signal.SIGCONT)
    job.signal(signal.SIGTERM)
    job.wait()
    assert "RankHung" not in {one["event"] for one in job.events()}


def test_time_in_which_msrun_is_stopped_as_well_counts_for_nobody(msrun: Launcher) -> None:
    job = start(msrun, "all=trains", options=("--hang_timeout=1.5",))
    stopped = (*job.pids().values(), job.pid)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)  # nothing but the time itself can be awaited
    continued = time.time()
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    job.wait()  # all wait in collectives, and for that they have twice the limit, from now on
    assert the(job, "RankHung")["time"] - continued > 2.5


def stop_when_judged_twice(job: Job) -> None:
    """Nobody is judged any more when this returns."""
    poll(lambda: sum(one["event"] == "HangJudged" for one in job.events()) >= 2)
    job.signal(signal.SIGTERM)
    poll(lambda: any(one["event"] == "StopRequested" for one in job.events()))


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Keep a process from running, as ``docker pause`` does."""
    folder = FREEZER / f"msrun_test_{pid}"
    folder.mkdir()
    try:
        (folder / "cgroup.procs").write_text(f"{pid}")
        (folder / "freezer.state").write_text("FROZEN")
        poll(lambda: (folder / "freezer.state").read_text() == "FROZEN\n")
        yield
    finally:
        (folder / "freezer.state").write_text("THAWED")
        (FREEZER / "cgroup.procs").write_text(f"{pid}")
        folder.rmdir()


@pytest.mark.skipif(
    not os.access(FREEZER / "cgroup.procs", os.W_OK), reason="no control group can be made here"
)
def test_a_rank_that_is_frozen_is_left_alone(msrun: Launcher) -> None:
    job = start(msrun, "all=trains", options=("--hang_timeout=1",))
    with frozen(job.pids()[1]):
        stop_when_judged_twice(job)
    told = the(job, "JobStandsStill")["reason"]
    assert told.startswith("rank 1 is frozen by its control group: msrun ends no rank, and waits")
    assert told in job.wait().err
    assert "RankHung" not in {one["event"] for one in job.events()}


def test_msrun_does_not_deny_that_it_killed_who_did_not_leave(msrun: Launcher) -> None:
    job = start(msrun, "1=raise", "1=stays", options=("--shutdown-timeout=1",))
    (msrun.tmp / "go").touch()
    ended = job.wait()
    why = "msrun sent the signal: rank 1 still alive 1 s after the signal"
    assert f"was killed by SIGKILL\n  hint: {why}\n" in ended.err
    root = json.loads((job.folder / "failure.json").read_text())["root"]
    assert (root["rank"], root["signal_name"], root["hint"]) == (1, "SIGKILL", why)
    assert root["ended_by_msrun"] == "rank 1 still alive 1 s after the signal"


def test_a_rank_inside_the_kernel_is_left_alone(msrun: Launcher) -> None:
    os.mkfifo(msrun.tmp / "pipe")
    job = start(msrun, "all=trains", "1=kernel", options=("--hang_timeout=1",))
    os.kill(job.pids()[1], signal.SIGUSR1)
    stop_when_judged_twice(job)
    (msrun.tmp / "pipe").write_text("")
    told = the(job, "JobStandsStill")["reason"]
    assert "; rank 1 cannot be killed before the kernel has done (state D): msrun takes it" in told
    assert told in job.wait().err
    assert "RankHung" not in {one["event"] for one in job.events()}
