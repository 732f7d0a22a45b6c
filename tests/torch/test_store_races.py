"""Restarts, sweeps and stops while the store host is on its way, or needed for a last word."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from support.jobs import WORKERS, Job, Launcher

pytestmark = [pytest.mark.torch, pytest.mark.warm]
INHERITED = 1050  # more than select() can hold


def attempts(job: Job) -> list[int]:
    return [event["attempt"] for event in job.events() if event["event"] == "StartAttempt"]


@pytest.mark.parametrize(
    ("ranks", "children", "restarts"),
    [
        (2, 0, 20),  # the store host is ordered, or has just come, at the restart
        (2, 2, 4),  # it is one of many, and large, processes that a sweep ends
    ],
)
def test_a_restart_at_any_moment_of_the_store_s_start_is_a_restart(
    msrun: Launcher, ranks: int, children: int, restarts: int
) -> None:
    job = msrun.start(
        *(f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"), WORKERS / "knock.py", children
    )
    ended = job.wait()
    assert ended.code == 1, ended
    assert attempts(job) == list(range(restarts + 1))
    assert "Traceback" not in ended.err
    assert "Traceback" not in (job.folder / "scheduler.log").read_text()
    assert "cannot be killed" not in ended.err
    assert not msrun.marked()


def test_the_store_answers_after_a_sigterm_to_every_process_of_the_run(msrun: Launcher) -> None:
    """As a batch system ends a job: ranks still agree on what they saved."""
    job = msrun.start("--nproc-per-node=2", WORKERS / "save_at_term.py")
    job.await_lines("ready", 2)
    job.await_state("running")
    processes = msrun.marked()
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in processes]
    assert {"msrun-fork", "msrun-store"} <= set(names)
    assert len(names) == 5, names
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    (msrun.tmp / "go").touch()
    ended = job.wait()
    assert ended.code == 143, ended
    assert sum(log.count("all saved [0, 1]") for log in job.logs().values()) == 2, job.logs()


def test_more_than_a_thousand_inherited_descriptors_do_no_harm_to_a_group(msrun: Launcher) -> None:
    done = msrun.run_with_descriptors(INHERITED, WORKERS / "allreduce.py")
    (said,) = done.stderr.splitlines()
    assert (done.returncode, b"allreduce.py has no TrainState" in said) == (0, True), done
    assert not msrun.marked()
