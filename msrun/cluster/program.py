"""A program on a node of the cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.01
CLOSE_S = 150.0  # after its node was killed; a busy machine takes its time


@dataclass
class NodeProgram:
    """A program on a node."""

    process: subprocess.Popen[bytes]  # ends as the program ends
    pid: int  # the program's, as it is seen from outside
    out: Path
    err: Path

    def wait(self, within_s: float = CLOSE_S) -> int:
        """Its exit code, or minus the signal that it died of.

        Raises:
            subprocess.TimeoutExpired: it has not ended by then.
        """
        return self.process.wait(within_s)

    def signal(self, signum: int) -> None:
        """Send it a signal from outside; nothing if it has ended."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def say(self, line: str) -> None:
        """A line on its standard input, of a program that was run with a pipe there."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def output(self) -> str:
        """What it has written to stdout."""
        return self.out.read_text(errors="replace")

    def errors(self) -> str:
        """What it has written to stderr."""
        return self.err.read_text(errors="replace")

    def await_output(self, text: str, within_s: float = CLOSE_S) -> None:
        """Wait until it has written ``text``.

        Raises:
            RuntimeError: it has ended without, or the time is over.
        """
        deadline = time.monotonic() + within_s
        while True:
            has_ended = self.process.poll() is not None
            if text in self.output():
                return
            if has_ended or time.monotonic() > deadline:
                raise RuntimeError(f"no {text!r}: {self.output()}\n{self.errors()}")
            time.sleep(LOOK_S)

    def reap(self) -> None:
        """Let the kernel forget it, if it has ended.

        Its namespace does not end before. If what has entered there with it is killed before it,
        the program is left to whoever adopts orphans: a drill does.
        """
        if self.process.poll() == -signal.SIGKILL:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)

    def close(self) -> None:
        """Wait for the end of a program that was killed."""
        self.process.wait(CLOSE_S)
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):  # words that nobody has read
                self.process.stdin.close()


def kill(pid: int) -> None:
    """SIGKILL, unless it has ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def only_child(pid: int) -> int:
    """The only child of a process."""
    (found,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found)
