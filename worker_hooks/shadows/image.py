"""Copies of this process: a shadow sleeps as it was at an optimizer step, and forks on order.

Both are forked by a process between, which exits at once, so the kernel gives them to the agent: it
learns of their ends itself, and the script sees no child of its own. A shadow that was woken stays
asleep; what it forks returns into the script. So a rank that dies again, even while it wakes, still
has its shadow.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from worker_hooks.contract import protocol, wire
from worker_hooks.contract.process_stat import SHADOW
from worker_hooks.shadows import files, shared_memory

_PDEATHSIG, _NAME = 1, 15  # PR_SET_* of linux/prctl.h
FAILED = 70  # exit code of a copy that could not wake
_ADOPTION_S = 60.0
_OOM_SCORE, _FIRST = "/proc/self/oom_score_adj", "1000"  # of proc(5)

_libc = ctypes.CDLL(None, use_errno=True)


class Agent(NamedTuple):
    """The msrun that this process is a child of."""

    pid: int
    name: str  # of its socket, without the leading NUL

    def connect(self) -> socket.socket:
        """A line to it.

        Raises:
            OSError: it is gone.
        """
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(f"\0{self.name}")
        except OSError:
            link.close()
            raise
        return link


class Woken(NamedTuple):
    """What the agent ordered when it woke this copy."""

    order: protocol.WakeShadow


class Shared(NamedTuple):
    """What a process has in common with others, as it is to be in its copy."""

    locks: shared_memory.Contents
    batches: shared_memory.Contents
    pipes: Collection[int] = ()  # that the copy lets go


def fork(agent: Agent, made: protocol.ShadowMade, shared: Shared) -> Woken | None:
    """Make a shadow; ``None`` in this process, and what was ordered in a copy that was woken.

    Raises:
        OSError: there can be no more processes.
    """
    _flush()
    drawn = _random_state()
    positions = files.positions()
    if not _fork_adopted():
        return None
    try:
        order = _sleep(agent, made, shared)
        _wake(agent, made.rank, order, positions)
        shared_memory.put_back(shared.locks)
        _set_random_state(drawn)
    except BaseException:  # noqa: BLE001  whatever it is, the script must not go on
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(FAILED)
    return Woken(order)


def _flush() -> None:
    """What waits to be written would be written by each copy."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it is closed, or the disk is full
            stream.flush()
    _libc.fflush(None)


def _random_state() -> Any:
    random = sys.modules.get("random")  # it seeds itself anew in each forked child
    return None if random is None else random.getstate()


def _set_random_state(drawn: Any) -> None:
    if drawn is not None:
        sys.modules["random"].setstate(drawn)


def _fork_adopted() -> bool:
    """Fork a process that becomes the agent's child; whether this is it.

    Raises:
        OSError: there can be no more processes.
    """
    between = os.fork()
    if between == 0:
        try:
            middle = os.getpid()
            child = os.fork()
        except BaseException:  # noqa: BLE001  in neither of them may the script go on
            os._exit(1)
        if child:
            os._exit(0)
        _await_end(middle)
        return True
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: the kernel has reaped it
        _, status = os.waitpid(between, 0)
        if status:
            raise OSError("no more processes can be made")
    return False


def _await_end(pid: int) -> None:
    """Wait until the process between is gone, and the kernel has made the agent our parent."""
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        waiting = select.poll()
        waiting.register(fd, select.POLLIN)
        waiting.poll(_ADOPTION_S * 1000)
        os.close(fd)


def _be_child_of(agent: Agent) -> None:
    """Lead a session, and die with the agent."""
    os.setsid()
    _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent.pid:  # it died before the kernel was told
        os._exit(1)


def _sleep(agent: Agent, made: protocol.ShadowMade, shared: Shared) -> protocol.WakeShadow:
    """Be a shadow; returns in what it forks when it is woken, never in itself."""
    _be_child_of(agent)
    files.let_go(shared.pipes)
    shared_memory.own(shared.batches)
    shared.batches.clear()
    name, killed_at = _thread_name(), _be_killed_first()
    _libc.prctl(_NAME, SHADOW.encode(), 0, 0, 0)
    link = agent.connect()
    wire.send(link, made._replace(pid=os.getpid()))
    while True:
        order, _ = wire.receive(link)
        if not isinstance(order, protocol.WakeShadow):
            os._exit(0)  # the agent is gone, or needs this shadow no more
        try:
            if _fork_adopted():
                link.close()
                _libc.prctl(_NAME, name, 0, 0, 0)
                _set_killed_at(killed_at)
                return order
        except OSError as error:
            wire.send(link, protocol.ForkFailed(made.rank, order.attempt, f"fork: {error}"))


def _be_killed_first() -> str:
    """If memory runs out, the kernel is to take a shadow and no rank; returns what was said before.

    A rank that lacks a shadow goes on.
    """
    try:
        with open(_OOM_SCORE) as file:
            before = file.read().strip()
    except OSError:
        return ""
    _set_killed_at(_FIRST)
    return before


def _set_killed_at(score: str) -> None:
    with contextlib.suppress(OSError), open(_OOM_SCORE, "w") as file:
        file.write(score)


def _thread_name() -> bytes:
    with open("/proc/self/comm", "rb") as file:
        return file.read().rstrip(b"\n")


def _wake(
    agent: Agent, rank: int, order: protocol.WakeShadow, positions: Mapping[int, int]
) -> None:
    """Be the rank's process in a later attempt, as it was when it was copied."""
    _be_child_of(agent)
    with agent.connect() as link:  # known before it does anything
        wire.send(link, protocol.Forked(rank, order.attempt, os.getpid()))
        confirmed, _ = wire.receive(link)
    if not isinstance(confirmed, protocol.WakeShadow):  # the attempt is over by now
        os._exit(0)
    files.put_back(positions)
    for stream, path in ((1, order.stdout), (2, order.stderr)):
        if path:
            files.append_to(path, stream)
    os.environ.update(order.environ)
    # what libraries end at exit may wait for threads that were not copied; last-in, first-out
    _libc.on_exit(_libc._exit, None)  # noqa: SLF001  C's name for it
    _libc.on_exit(_libc.fcloseall, None)
