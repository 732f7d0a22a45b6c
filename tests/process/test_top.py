"""`msrun top` at a terminal, with a real job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.graceful_jobs import start
from support.jobs import DEADLINE_S, Launcher
from support.screens import CONTROL, ENTER, LEAVE, Terminal


def watch(msrun: Launcher, terminal: Terminal, *args: str) -> subprocess.Popen:
    terminal.shown = ""
    tty = terminal.theirs
    return subprocess.Popen(
        [sys.executable, "-m", "msrun", "top", *args],
        env=msrun.env(TERM="xterm"), cwd=msrun.tmp, stdin=tty, stdout=tty, stderr=tty, start_new_session=True,
    )  # fmt: skip


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_a_job_is_watched_to_its_end(msrun: Launcher, terminal: Terminal) -> None:
    job = start(msrun)
    top = watch(msrun, terminal, "--interval=0.1")
    terminal.until(re.escape(ENTER))
    row = rf"\n\x1b\[K[^\n]* 0 +{job.pids()[0]} .*running.*updated +2/5 "
    frame = terminal.until(row + r".*q quit")
    assert max(map(len, CONTROL.sub("", frame).splitlines())) <= 80
    assert not terminal.is_as_before()
    terminal.type("jl")
    terminal.until(r"rank 1: \S+worker_1\.log.*welcome.*ready.*Esc back")
    top.send_signal(signal.SIGTSTP)  # in a session of its own nothing stops; it goes on at once
    terminal.until(re.escape(LEAVE) + ".*" + re.escape(ENTER) + ".*Esc back")
    terminal.type("\x1b")
    terminal.until("q quit")
    os.kill(job.pids()[1], signal.SIGKILL)
    terminal.until(re.escape(LEAVE) + r".*failed.*rank 1 was killed by SIGKILL.*\n +1 .*failed ")
    assert top.wait(DEADLINE_S) == 0 and terminal.is_as_before()
    job.wait()
    top = watch(msrun, terminal)
    terminal.until(r"run \S+ is not running: failed\r\n")
    assert top.wait(DEADLINE_S) == 0


def test_every_way_out_gives_the_terminal_back(msrun: Launcher, terminal: Terminal) -> None:
    job = start(msrun, ranks=1)
    ways = {"q": 0, signal.SIGTERM: -15, signal.SIGINT: -2, signal.SIGHUP: -1}
    for way, code in ways.items():
        top = watch(msrun, terminal)
        terminal.until(re.escape(ENTER) + ".*q quit")
        assert not terminal.is_as_before()
        terminal.type(way) if isinstance(way, str) else top.send_signal(way)
        terminal.until(re.escape(LEAVE))
        assert top.wait(DEADLINE_S) == code and terminal.is_as_before(), way
    frame = subprocess.run(
        [sys.executable, "-m", "msrun", "top", "--once"],
        env=msrun.env(COLUMNS="80", NO_COLOR="1"), cwd=msrun.tmp, capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    ).stdout  # fmt: skip
    assert max(map(len, frame.splitlines())) <= 80 and "\x1b" not in frame
    assert re.search(rf"\n   0 +{job.pids()[0]} running   updated +2/5 ", frame)
    job.signal(signal.SIGTERM)
    job.wait()
