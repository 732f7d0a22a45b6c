"""A job tells others what happens to it: a command, a web hook, a file and a port of metrics."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from support.free_ports import free_port
from support.jobs import WORKERS, poll
from support.web_server import web_server

pytestmark = [pytest.mark.torch, pytest.mark.warm]
ENDLESS = (WORKERS / "train_small.py", "--epochs=9999")


@pytest.fixture
def hook():
    with web_server() as made:
        yield made


def program(folder, text):
    path = folder / "tell"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def couriers(job):
    """Pids of msrun's children that deliver events."""
    found = []
    for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if "notify.courier" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(int(pid))
    return found


def is_running(job, attempt):
    """Whether every rank trains in this attempt: who stops it sooner interrupts a replacement."""
    status = job.status()
    return (status["attempt"], status["state"]) == (attempt, "running")


def steps(job, since):
    workers = job.status()["workers"]
    return len(workers) == 2 and all(each.get("step", 0) > since for each in workers)


def test_a_killed_rank_a_stop_and_the_end_are_told_everywhere(msrun, hook):
    tell = program(msrun.tmp, 'echo "$EVENT|$RANK|$RUN_ID|$STEP|$REASON" >> "$1"')
    port = free_port()
    job = msrun.start(
        "--worker_num=2",
        "--rdzv-id=mine",
        f"--on_event={tell} 'told here'",
        "--metrics_file=m.prom",
        f"--metrics_port={port}",
        *ENDLESS,
        PET_WEBHOOK=f"http://me:secret@127.0.0.1:{hook.server_port}/x",
    )
    poll(lambda: steps(job, 5))
    os.kill(job.pids()[1], signal.SIGKILL)
    poll(lambda: is_running(job, 1) and steps(job, 30))
    poll(lambda: any(each["event"] == "replaced" for each in hook.got))

    def scraped():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return answer.read().decode()

    poll(lambda: 'msrun_replacements_total{run_id="mine"} 1.0\n' in scraped())
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 0, ended
    lines = [line.split("|") for line in (msrun.tmp / "told here").read_text().splitlines()]
    assert [line[0] for line in lines] == ["died", "replaced", "saved", "ended"], lines
    assert lines[0][1:3] == lines[1][1:3] == ["1", "mine"]
    assert lines[0][4] == "rank 1 was killed by SIGKILL" and int(lines[0][3]) > 5
    posted = [(each["event"], each["rank"], str(each["step"]), each["reason"]) for each in hook.got]
    assert posted == [(line[0], line[1], line[3], line[4]) for line in lines]
    assert hook.got[1]["lost_s"] > 0 and hook.got[1]["ranks"] == [1]
    text = (msrun.tmp / "m.prom").read_text()
    assert re.search(r'^msrun_job_state\{run_id="mine",state="stopped"\} 1\.0$', text, re.MULTILINE)
    kept = [*job.folder.rglob("*"), *(msrun.tmp / "state").rglob("*")]
    assert not any("secret" in path.read_text(errors="replace") for path in kept if path.is_file())


def test_a_command_that_hangs_and_an_address_that_is_silent_hold_nothing_up(msrun):
    with socket.socket() as silent:  # connects, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        pids = msrun.tmp / "pids"
        tell = program(msrun.tmp, f"echo $$ >> {pids}; sleep 600")
        job = msrun.start("--worker_num=2", f"--on_event={tell}", f"--webhook={address}", *ENDLESS)
        poll(lambda: steps(job, 5))
        os.kill(job.pids()[1], signal.SIGKILL)
        poll(lambda: is_running(job, 1) and steps(job, 30))
        job.signal(signal.SIGTERM)
        job.await_state("stopped")
        began = time.monotonic()
        ended = job.wait()
    assert ended.code == 0, ended
    assert time.monotonic() - began < 20  # it is five seconds on an idle machine
    assert ended.err.count("the job is over: the last events were not all delivered") == 1
    (pid,) = map(int, pids.read_text().split())
    poll(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_failing_command_is_said_once_and_a_killed_courier_too(msrun):
    job = msrun.start("--worker_num=2", "--on_event=false", *ENDLESS)
    newest = 5
    for attempt in (1, 2):
        poll(lambda: steps(job, newest))  # noqa: B023
        os.kill(job.pids()[1], signal.SIGKILL)
        poll(lambda now=attempt: job.status()["attempt"] == now)
        newest = 1 + max(each.get("step") or 0 for each in job.status()["workers"])
        # three deaths at one step would not be answered by a new rank
        poll(lambda: job.status()["state"] == "running" and steps(job, newest))  # noqa: B023
    (courier,) = couriers(job)
    os.kill(courier, signal.SIGKILL)
    poll(lambda: not couriers(job))
    os.kill(job.pids()[1], signal.SIGKILL)
    poll(lambda: is_running(job, 3) and steps(job, 5))
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 0, ended
    assert ended.err.count("--on_event failed for event died: exit code 1; said once") == 1
    assert ended.err.count("--on_event failed") == 1
    assert ended.err.count("events are left out") == 1


def test_that_msrun_was_killed_is_told(msrun, hook):
    address = f"--webhook=http://127.0.0.1:{hook.server_port}/"
    job = msrun.start("--worker_num=2", "--rdzv-id=mine", address, *ENDLESS)
    poll(lambda: steps(job, 5))
    job.signal(signal.SIGKILL)
    poll(lambda: hook.got)
    (told,) = hook.got
    assert (told["event"], told["reason"]) == ("ended", f"lost: msrun (pid {job.pid}) is gone")
    assert told["run_id"] == "mine"
