"""A child process that looks at what may hang: drivers, network file systems, name servers.

It is killed at its deadline, and left alone if even that does not end it.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

KILLED_S = 1.0  # for the end of a child that was killed


class ProbeAnswer(NamedTuple):
    """What a child printed, and how it ended; code ``None``: it was killed at its deadline."""

    out: str
    err: str
    code: int | None


class Probe:
    """One child, started at once: several look at the same time."""

    def __init__(self, words: Sequence[str], limit_s: float) -> None:
        """Start ``words``; it has ``limit_s`` seconds from now."""
        self._end_s = time.monotonic() + limit_s
        self._child: subprocess.Popen[bytes] | None = None
        self._problem = ""
        try:
            self._child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            self._problem = f"cannot be started: {error.strerror}"

    def answer(self) -> ProbeAnswer:
        """Wait for its end or its deadline."""
        if self._child is None:
            return ProbeAnswer("", self._problem, 1)
        try:
            out, err = self._child.communicate(timeout=max(0.0, self._end_s - time.monotonic()))
        except subprocess.TimeoutExpired as late:
            self._give_up(self._child)
            return ProbeAnswer(_text(late.stdout), _text(late.stderr), None)
        return ProbeAnswer(_text(out), _text(err), self._child.returncode)

    def _give_up(self, child: subprocess.Popen[bytes]) -> None:
        child.kill()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it sits in the kernel: leave it
            child.wait(KILLED_S)


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")
