"""The agent's child processes: who has ended and how; signals to them and their groups."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterator
from typing import NamedTuple

from worker_hooks.contract.process_stat import children, read_stat

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class EndedProcess(NamedTuple):
    """A dead child of the agent that is not yet reaped, so nobody else has its pid."""

    pid: int
    exit_code: int


def become_subreaper() -> None:
    """Adopt every orphan below this process, so that all of them can be killed and reaped.

    Raises:
        OSError: the kernel refused (Linux before 3.4).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def ended_children() -> Iterator[EndedProcess]:
    """Every dead child in the kernel's order; each is reaped after the caller has handled it.

    Until then it is a zombie, so its pid and its group's id cannot belong to anybody else: that is
    the moment to signal the group.
    """
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None:
            return
        exited = found.si_code == os.CLD_EXITED
        yield EndedProcess(found.si_pid, found.si_status if exited else -found.si_status)
        os.waitid(os.P_PID, found.si_pid, os.WEXITED)


def is_exiting(pid: int) -> bool:
    """Whether a process is about to be dead: its descriptors close a little earlier."""
    found = read_stat(pid)
    return found is None or found.is_exiting


def is_stopped(pid: int) -> bool:
    """Whether a signal keeps a process from running (SIGSTOP)."""
    found = read_stat(pid)
    return found is not None and found.state == "T"


def signal_group(pid: int, signum: int) -> None:
    """Signal the group that ``pid`` leads, or ``pid`` alone while it leads none yet.

    ``pid`` must be an unreaped child of ours. Then ESRCH only means that the group is empty, and
    EPERM that the process changed its user: nothing can be done.
    """
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        signal_one(pid, signum)
    except PermissionError:
        return


def signal_one(pid: int, signum: int) -> None:
    """Signal an unreaped child of ours. EPERM: it changed its user, nothing can be done."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return


def adopted(spared: frozenset[int]) -> list[int]:
    """Children of this process except ``spared``: processes that workers left behind."""
    return [pid for pid in children(os.getpid()) if pid not in spared]


def end_adopted(spared: frozenset[int], within_s: float) -> list[int]:
    """Kill all children except ``spared``, and the orphans they leave, until there are none.

    Returns:
        The pids that were killed. A process in uninterruptible sleep may outlast ``within_s``.
    """
    killed: list[int] = []
    deadline = time.monotonic() + within_s
    while left := adopted(spared):
        for pid in left:
            signal_group_or_process(pid)
            if pid not in killed:
                killed.append(pid)
        for pid in left:
            _reap_until(pid, deadline)
        if time.monotonic() > deadline:
            break
    return killed


def signal_group_or_process(pid: int) -> None:
    """Send SIGKILL to a child of ours, and to its group if it leads one."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # already dead, or no longer ours to kill


def end_child(pid: int, within_s: float) -> None:
    """Kill a process and wait until it is gone, if it is an unreaped child of ours."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(pid, signal.SIGKILL)
    except (ChildProcessError, ProcessLookupError):
        return  # it was reaped already: another process may have its pid
    _reap_until(pid, time.monotonic() + within_s)


def _reap_until(pid: int, deadline: float) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        waiting = select.poll()  # not select(): a descriptor may be above 1023
        waiting.register(fd, select.POLLIN)
        if waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            os.waitid(os.P_PID, pid, os.WEXITED)
    except ChildProcessError:
        return  # it was reaped elsewhere
    finally:
        os.close(fd)
