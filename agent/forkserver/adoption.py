"""Forks processes that become the agent's children.

A short-lived middle process forks them and exits, so the kernel gives them to the nearest
subreaper, the agent, which reaps them itself and gets their true exit status. One middle process
serves a full order: eight workers cost nine forks.

No child runs unannounced: it waits for a byte that the middle process writes only after it has
reported all of them to the forkserver. If the middle process is killed before, the kernel closes
the pipe and the children exit.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

CHUNK_BYTES = 65_536


class AdoptionResult(NamedTuple):
    """The result of one fork: a process id, or 0 and why not."""

    pid: int
    why: str = ""


def fork_adopted(count: int) -> int | tuple[AdoptionResult, ...]:
    """Fork ``count`` processes: return the results here, and in each child its index.

    When this returns here, every process with a pid is the agent's child.
    """
    pipes: list[int] = []
    try:
        pipes += os.pipe()
        pipes += os.pipe()
        middle = os.fork()
    except OSError as error:
        for fd in pipes:
            os.close(fd)
        return (AdoptionResult(0, _why(error)),) * count
    results, report, start, give_start = pipes
    if middle == 0:
        os.close(results)
        return _fork_all(count, report, start, give_start)
    for fd in (report, start, give_start):
        os.close(fd)
    outcomes = _read_results(results)
    os.close(results)
    os.waitpid(middle, 0)
    if len(outcomes) < count:
        return (AdoptionResult(0, "the process that forks it was killed"),) * count
    return outcomes


def _fork_all(count: int, report: int, start: int, give_start: int) -> int:
    """In the middle process; returns in the children only."""
    for index in range(count):
        try:
            pid = os.fork()
        except OSError as error:
            os.write(report, f"0 {_why(error)}\n".encode())
            continue
        if pid == 0:
            os.close(report)
            os.close(give_start)
            if not os.read(start, 1):
                os._exit(1)
            os.close(start)
            return index
        os.write(report, f"{pid} \n".encode())
    os.write(give_start, b"." * count)
    os._exit(0)


def _read_results(results: int) -> tuple[AdoptionResult, ...]:
    text = b""
    while chunk := os.read(results, CHUNK_BYTES):
        text += chunk
    lines = text.decode().split("\n")[:-1]  # an incomplete line was cut off by a death
    fields = (line.split(" ", 1) for line in lines)
    return tuple(AdoptionResult(int(pid), why) for pid, why in fields)


def _why(error: OSError) -> str:
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return f"fork: {error.strerror}; raise the limit of open files (ulimit -n)"
    return f"fork: {error.strerror}; raise the limit of processes (ulimit -u) or free memory"
