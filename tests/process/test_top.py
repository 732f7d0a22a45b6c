"""`msrun top` at a terminal, with a real job."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest
from support.graceful_jobs import start
from support.jobs import DEADLINE_S, Launcher

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class Terminal:
    """24 lines of 80 columns, and what was written there."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self.shown = launcher, ""
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.theirs)

    def watch(self, *args: str) -> subprocess.Popen:
        self.shown = ""
        return subprocess.Popen(
            [sys.executable, "-m", "msrun", "top", *args],
            env=self.launcher.env(TERM="xterm"), cwd=self.launcher.tmp,
            stdin=self.theirs, stdout=self.theirs, stderr=self.theirs, start_new_session=True,
        )  # fmt: skip

    def until(self, pattern: str) -> str:
        """What was written from the last call to where this is found."""
        deadline = time.monotonic() + 20
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self.ours], [], [], left)[0], (
                f"{pattern}\n{self.shown}"
            )
            self.shown += os.read(self.ours, 1 << 16).decode()
        shown, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return shown

    def type(self, typed: str) -> None:
        os.write(self.ours, typed.encode())

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self.theirs) == self.before


@pytest.fixture
def terminal(msrun: Launcher) -> Iterator[Terminal]:
    terminal = Terminal(msrun)
    yield terminal
    os.close(terminal.ours)
    os.close(terminal.theirs)


def test_a_job_is_watched_to_its_end(msrun: Launcher, terminal: Terminal) -> None:
    job = start(msrun)
    top = terminal.watch("--interval=0.1")
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
    top = terminal.watch()
    terminal.until(r"run \S+ is not running: failed\r\n")
    assert top.wait(DEADLINE_S) == 0


def test_every_way_out_gives_the_terminal_back(msrun: Launcher, terminal: Terminal) -> None:
    job = start(msrun, ranks=1)
    ways = {"q": 0, signal.SIGTERM: -15, signal.SIGINT: -2, signal.SIGHUP: -1}
    for way, code in ways.items():
        top = terminal.watch()
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
