"""A terminal on which a program draws: what was written there, and what is typed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
LINES, COLUMNS = 24, 80


class Terminal:
    """24 lines of 80 columns."""

    def __init__(self) -> None:
        self.shown = ""
        self.ours, self.theirs = pty.openpty()
        size = struct.pack("HHHH", LINES, COLUMNS, 0, 0)
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, size)
        self.before = termios.tcgetattr(self.theirs)

    def until(self, pattern: str, within_s: float = 20.0) -> str:
        """What was written from the last call to where this is found."""
        deadline = time.monotonic() + within_s
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

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)
