"""The terminal while ``msrun top`` uses it: keys arrive at once, and every exit restores it.

A signal may arrive during anything, even during a write that a paused terminal does not take. So
the signal handlers themselves restore the terminal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Self

from rich.console import Console
from rich.text import Text

from msrun.terminal.stdout import put_bytes
from msrun.top.keys import PLAIN, keys

STDIN, STDOUT = 0, 1
ENTER = b"\x1b[?1049h\x1b[?25l"  # the alternate screen, no cursor
LEAVE = b"\x1b[?25h\x1b[?1049l"
HOME, ERASE_LINE, ERASE_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
DEADLY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SEQUENCE_S = 0.05  # within which all bytes of one key arrive


class Screen:
    """Full-screen frames out, keys in; a context during which the terminal is in this mode."""

    def __init__(self, ended: int, plain: Mapping[bytes, str] = PLAIN) -> None:
        """Change nothing yet.

        Args:
            ended: a descriptor that becomes readable when waiting makes no more sense.
            plain: what keys of one byte mean.
        """
        self._ended = ended
        self._plain = plain
        self._before = termios.tcgetattr(STDIN) if os.isatty(STDIN) else None
        self._typed = b""
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._console = Console(highlight=False, markup=False, emoji=False)

    def __enter__(self) -> Self:
        """Change the terminal's mode."""
        for signum in DEADLY:
            signal.signal(signum, self._die)
        signal.signal(signal.SIGTSTP, self._pause)
        signal.signal(signal.SIGCONT, self._resume)
        signal.signal(signal.SIGWINCH, self._redraw)
        self._change_mode()
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal and the default signal actions."""
        self._restore()
        for signum in (*DEADLY, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(self._wake_read)
        os.close(self._wake_write)

    @property
    def size(self) -> os.terminal_size:
        """The terminal's size as it is now."""
        return os.get_terminal_size(STDOUT)

    def draw(self, lines: Sequence[Text]) -> None:
        """Show a frame, cut to the terminal's lines."""
        self._console.width = self.size.columns
        with self._console.capture() as captured:
            for line in lines[: self.size.lines]:
                self._console.print(line, no_wrap=True, overflow="crop")
        # a line is erased before it is written: after a full line the cursor is still on it
        shown = captured.get().removesuffix("\n").replace("\n", f"\n{ERASE_LINE}")
        encoding = sys.stdout.encoding or "utf-8"
        text = f"{HOME}{ERASE_LINE}{shown}"
        if len(lines) < self.size.lines:
            text += f"\n{ERASE_BELOW}"
        put_bytes(STDOUT, text.encode(encoding, errors="replace"))

    def wait(self, within_s: float) -> list[str]:
        """The keys that were typed; none: the time is over, the job has ended, or the frame must be
        drawn again.
        """
        ready = self._ready(within_s)
        while STDIN in ready:
            octets = os.read(STDIN, 1024)
            if not octets:
                return ["quit"]  # the terminal is gone
            found, self._typed = keys(self._typed + octets, is_all=False, plain=self._plain)
            if found or not self._typed:
                return found
            ready = self._ready(SEQUENCE_S)
        found, self._typed = keys(self._typed, is_all=True, plain=self._plain)
        return found

    def _ready(self, within_s: float) -> set[int]:
        waiting = select.poll()
        for fd in (self._wake_read, self._ended, *([STDIN] if self._before else [])):
            waiting.register(fd, select.POLLIN)
        ready = {fd for fd, _ in waiting.poll(max(0, round(within_s * 1000)))}
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 1024)
        return ready

    def _change_mode(self) -> None:
        if self._before is not None:
            tty.setcbreak(STDIN, termios.TCSANOW)
        self._send(ENTER)

    def _restore(self) -> None:
        self._send(LEAVE)
        if self._before is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(STDIN, termios.TCSANOW, self._before)

    @staticmethod
    def _send(sequence: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(STDOUT, sequence)

    def _die(self, signum: int, _: FrameType | None) -> None:
        self._restore()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    def _pause(self, signum: int, _: FrameType | None) -> None:
        self._restore()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)  # returns after SIGCONT
        signal.signal(signum, self._pause)
        self._resume(signum, None)

    def _resume(self, _: int, __: FrameType | None) -> None:
        """Also after a SIGSTOP, which cannot be caught: the shell has restored the terminal."""
        self._change_mode()
        self._redraw(0, None)

    def _redraw(self, _: int, __: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")
