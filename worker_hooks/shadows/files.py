"""Descriptors of a copy: positions in files are put back, connections are let go.

A copy shares each open file with the process, and its position, which moves on with the process.
So positions are noted at the copy and put back when it wakes: reading goes on where it was, and
what is written again lies over what was written.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Mapping

_LET_GO = ("socket:", "anon_inode:[eventpoll]", "anon_inode:[eventfd]")


def positions() -> Mapping[int, int]:
    """Where this process is in each of its files."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile, or it has no position
            if stat.S_ISREG(os.fstat(fd).st_mode):
                found[fd] = os.lseek(fd, 0, os.SEEK_CUR)
    return found


def put_back(known: Mapping[int, int]) -> None:
    """Return to these positions."""
    for fd, position in known.items():
        with contextlib.suppress(OSError):
            os.lseek(fd, position, os.SEEK_SET)


def let_go(others: Collection[int] = ()) -> None:
    """Point each connection at nothing without telling its peer: it is the process's.

    Otherwise the peers of a process that dies would not notice, as its copy has it open still.
    ``others``: pipes that are such connections, too.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if fd in others or os.readlink(f"/proc/self/fd/{fd}").startswith(_LET_GO):
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def append_to(path: str, stream: int) -> None:
    """Let a stream go on in another file."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:  # a full disk or a missing folder: the agent reports it
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(fd, stream)
    os.close(fd)
