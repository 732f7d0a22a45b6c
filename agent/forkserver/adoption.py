"""Forks processes that become the agent's children, and are known to it before they do anything.

A short-lived middle process forks them and exits, so the kernel gives them to the nearest
subreaper, the agent, which reaps them itself and gets their true exit status. One middle process
serves a full order: eight workers cost nine forks.

Each child introduces itself to the agent once it is the agent's child; if it cannot, it exits. So
whoever is killed meanwhile, no child runs that the agent does not know: a packet that was sent can
be read although its sender is dead. The forkserver learns by a pipe which children came that far,
and answers for the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from typing import NamedTuple

CHUNK_BYTES = 65_536
KILLED = "it was killed before it began"


class AdoptionResult(NamedTuple):
    """The result of one fork: the id of a process that introduced itself, or 0 and why not."""

    pid: int
    why: str = ""


def fork_adopted(count: int, introduce: Callable[[int], None]) -> int | tuple[AdoptionResult, ...]:
    """Fork ``count`` processes: return the results here, and in each child its index.

    Args:
        introduce: called in each child with its index; it waits until the child is the agent's,
            and tells the agent, or does not return.
    """
    pipe: tuple[int, ...] = ()
    try:
        pipe = os.pipe()
        middle = os.fork()
    except OSError as error:
        for fd in pipe:
            os.close(fd)
        return (AdoptionResult(0, _why(error)),) * count
    results, report = pipe
    if middle == 0:
        os.close(results)
        return _fork_all(count, report, introduce)
    os.close(report)
    outcomes = _read_results(results)
    os.close(results)
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: the kernel has reaped it
        os.waitpid(middle, 0)
    return tuple(outcomes.get(index, AdoptionResult(0, KILLED)) for index in range(count))


def _fork_all(count: int, report: int, introduce: Callable[[int], None]) -> int:
    """In the middle process; returns in the children only."""
    for index in range(count):
        try:
            pid = os.fork()
        except OSError as error:
            _report(report, index, AdoptionResult(0, _why(error)))
            continue
        if pid == 0:
            introduce(index)
            _report(report, index, AdoptionResult(os.getpid()))
            os.close(report)
            return index
    os._exit(0)


def _report(report: int, index: int, result: AdoptionResult) -> None:
    with contextlib.suppress(BrokenPipeError):  # the forkserver was killed
        os.write(report, f"{index} {result.pid} {result.why}\n".encode())


def _read_results(results: int) -> dict[int, AdoptionResult]:
    """By index; the end is there when the middle process and all children are done, or dead."""
    text = b""
    while chunk := os.read(results, CHUNK_BYTES):
        text += chunk
    lines = (line.split(" ", 2) for line in text.decode().splitlines())
    return {int(index): AdoptionResult(int(pid), why) for index, pid, why in lines}


def _why(error: OSError) -> str:
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return f"fork: {error.strerror}; raise the limit of open files (ulimit -n)"
    return f"fork: {error.strerror}; raise the limit of processes (ulimit -u) or free memory"
