"""The terminal while ``msrun top`` has it: keys come at once, and every way out gives it back.

A signal may come in the middle of anything, a write that a paused terminal does not take
included; so what gives the terminal back is done right where the signal is heard.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType
from typing import Self

from rich.console import Console
from rich.text import Text

from msrun.terminal.stdout import put_bytes
from msrun.top.keys import keys

STDIN, STDOUT = 0, 1
ENTER = b"\x1b[?1049h\x1b[?25l"  # the other screen, no cursor
LEAVE = b"\x1b[?25h\x1b[?1049l"
HOME, ERASE_LINE, ERASE_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
DEADLY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SEQUENCE_S = 0.05  # the bytes of one key come within this


class Screen:
    """Full-screen frames out, keys in; a context that has the terminal while it lasts."""

    def __init__(self, ended: int) -> None:
        """``ended``: a descriptor that becomes readable when nothing is to be waited for."""
        self._ended = ended
        self._before = termios.tcgetattr(STDIN) if os.isatty(STDIN) else None
        self._typed = b""
        self._waker, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._console = Console(highlight=False, markup=False, emoji=False)

    def __enter__(self) -> Self:
        """Take the terminal."""
        for signum in DEADLY:
            signal.signal(signum, self._die)
        signal.signal(signal.SIGTSTP, self._pause)
        signal.signal(signal.SIGCONT, self._resume)
        signal.signal(signal.SIGWINCH, self._rouse)
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back; signals do what they do by default."""
        self._give_back()
        for signum in (*DEADLY, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(self._waker)
        os.close(self._wake)

    @property
    def size(self) -> os.terminal_size:
        """As it is now."""
        return os.get_terminal_size(STDOUT)

    def draw(self, lines: Sequence[Text]) -> None:
        """Show a frame, no more lines than the terminal has."""
        self._console.width = self.size.columns
        with self._console.capture() as captured:
            for line in lines[: self.size.lines]:
                self._console.print(line, no_wrap=True, overflow="crop")
        # a line is erased before it is written: after a full one the cursor still stands on it
        shown = captured.get().removesuffix("\n").replace("\n", f"\n{ERASE_LINE}")
        encoding = sys.stdout.encoding or "utf-8"
        text = f"{HOME}{ERASE_LINE}{shown}"
        if len(lines) < self.size.lines:
            text += f"\n{ERASE_BELOW}"
        put_bytes(STDOUT, text.encode(encoding, errors="replace"))

    def wait(self, within_s: float) -> list[str]:
        """The keys that were typed; none when the time is over, something ended, or all is to be
        drawn again.
        """
        ready = self._ready(within_s)
        while STDIN in ready:
            octets = os.read(STDIN, 1024)
            if not octets:
                return ["quit"]  # the terminal is gone
            found, self._typed = keys(self._typed + octets, is_all=False)
            if found or not self._typed:
                return found
            ready = self._ready(SEQUENCE_S)
        found, self._typed = keys(self._typed, is_all=True)
        return found

    def _ready(self, within_s: float) -> set[int]:
        waiting = select.poll()
        for fd in (self._waker, self._ended, *([STDIN] if self._before else [])):
            waiting.register(fd, select.POLLIN)
        ready = {fd for fd, _ in waiting.poll(max(0, round(within_s * 1000)))}
        if self._waker in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._waker, 1024)
        return ready

    def _take(self) -> None:
        if self._before is not None:
            tty.setcbreak(STDIN, termios.TCSANOW)
        self._tell(ENTER)

    def _give_back(self) -> None:
        self._tell(LEAVE)
        if self._before is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(STDIN, termios.TCSANOW, self._before)

    @staticmethod
    def _tell(sequence: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(STDOUT, sequence)

    def _die(self, signum: int, _: FrameType | None) -> None:
        self._give_back()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    def _pause(self, signum: int, _: FrameType | None) -> None:
        self._give_back()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)  # comes back when somebody says go on
        signal.signal(signum, self._pause)
        self._resume(signum, None)

    def _resume(self, _: int, __: FrameType | None) -> None:
        """Also after a SIGSTOP, of which nobody hears: the shell has the terminal as it was."""
        self._take()
        self._rouse(0, None)

    def _rouse(self, _: int, __: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"!")
