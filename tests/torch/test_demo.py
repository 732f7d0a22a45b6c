"""The demos: what is shown on a terminal, what a visitor kills, and the picture of the README."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.jobs import DEADLINE_S, poll

SCRIPTS = Path(__file__).parents[2] / "scripts/demonstration"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
pytestmark = pytest.mark.torch


class Visitor:
    """A person before a terminal, on which a demo runs."""

    def __init__(self, *words: str | Path, cwd: Path) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        environ = {name: text for name, text in os.environ.items() if not name.startswith("MSRUN_")}
        self.demo = subprocess.Popen(
            [sys.executable, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environ, "TERM": "xterm", "TMPDIR": str(cwd), "COLUMNS": "100"},
            cwd=cwd,
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        self._ours = ours
        self.seen = ""

    def sees(self, pattern: str) -> bool:
        """Whether the terminal has shown this since the last key."""
        try:
            while octets := os.read(self._ours, 1 << 16):
                self.seen += ESCAPES.sub("", octets.decode(errors="replace"))
        except (BlockingIOError, OSError):  # nothing new; or the demo has ended
            pass
        return re.search(pattern, self.seen) is not None

    def waits_for(self, pattern: str) -> None:
        poll(lambda: self.sees(pattern) or self.demo.poll() is not None)
        assert self.sees(pattern), self.seen[-3000:]

    def types(self, key: str) -> None:
        self.seen = ""
        os.write(self._ours, key.encode())

    def leaves(self) -> int:
        try:
            poll(lambda: (self.sees("$^"), self.demo.poll())[1] is not None)
            return self.demo.wait()
        finally:
            self.demo.kill()
            self.demo.wait()
            os.close(self._ours)


def test_a_visitor_kills_a_rank_and_msrun_and_the_weights_end_equal(tmp_path):
    visitor = Visitor(SCRIPTS / "live.py", "--play", cwd=tmp_path)
    visitor.waits_for(r"rank 7 .* [1-9]\d+ +pid \d+ +training")
    visitor.types("\x1b[A\x1b")  # an arrow and Esc mean nothing here
    visitor.types("3")
    visitor.waits_for(r"kill -9 of rank 3 .*: back after .* new pid \d+, no step lost")
    visitor.types("m")
    visitor.waits_for(r"kill -9 of msrun itself .*: back after .*no step lost")
    visitor.types("q")
    visitor.waits_for("The same training, undisturbed")
    assert visitor.leaves() == 0, visitor.seen[-3000:]
    assert visitor.sees("kills 2 +steps lost 0 +seconds lost")
    ends = re.findall(r"weights (?:after the kills|undisturbed) +(\w{64})", visitor.seen)
    assert len(ends) == 2 and ends[0] == ends[1]
    assert "equal on all 8 ranks, bit for bit" in visitor.seen
    assert not list(tmp_path.iterdir())


def test_a_visitor_who_leaves_leaves_nothing_behind(tmp_path):
    visitor = Visitor(SCRIPTS / "live.py", cwd=tmp_path)
    visitor.waits_for(r"rank 7 .* pid \d+ ")
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", visitor.seen)]
    visitor.demo.send_signal(signal.SIGINT)
    assert visitor.leaves() == 130
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert "all files of the demo are in" in visitor.seen


def test_the_picture_of_the_readme_is_made_from_a_real_demo(tmp_path):
    picture = tmp_path / "demo.svg"
    made = subprocess.run(
        [sys.executable, SCRIPTS / "picture.py", "--to", picture],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    root = ET.fromstring(picture.read_text())
    frames = [
        " ".join("".join(each.itertext()).replace("\xa0", " ") for each in frame.iter())
        for frame in root
        if frame.tag.endswith("}g")
    ]
    assert len(frames) == 7
    assert [any(word in frame for frame in frames) for word in ("killed", "replaced")] == [True] * 2
    assert "equal on all 8 ranks, bit for bit" in frames[-1]
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", picture.read_text())  # nothing is fetched
    assert [path.name for path in tmp_path.iterdir()] == ["demo.svg"]
