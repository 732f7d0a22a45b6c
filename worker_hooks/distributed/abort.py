"""Frees a main thread from a collective that a dead peer never joins.

NCCL's communicators can be aborted. gloo's cannot: in torch 2.13 its ``abort`` returns and wakes
nobody. But a rank that waits in gloo waits for bytes from the sockets to its peers, and shutting
those down in this process alone is enough: it raises within milliseconds. gloo then leaves its
buffers, gradient buckets mostly, as garbage; parameters and optimizers it does not touch.

Which sockets those are, gloo does not tell. They are TCP connections whose other end is held by
another rank of the job, that is by a child of the same agent; everything else that a script may
have open, a data base or a logger, stays as it is, and so does the store, which is no rank.

Once in some hundreds of broken collectives gloo (torch 2.13) forgets to wake a sender whose socket
is gone. Nothing else can be done for such a thread, so its process is ended and replaced like any
other that died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist

from worker_hooks.contract.process_stat import children, read_stat
from worker_hooks.distributed import stacks
from worker_hooks.distributed.socket_peers import peers_of

_STORE = "msrun-store"  # the short name of the store host, a child of the agent like the ranks


def unblock(agent_pid: int) -> int:
    """Break every connection to other ranks; how many there were. Any thread may call it.

    Raises nothing that belongs to a single connection or group: what is gone is free already.
    """
    _abort_groups()
    return _shut_down(agent_pid)


def _abort_groups() -> None:
    """Abort the communicators of every group, sub-groups included, that can be aborted."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):  # noqa: SLF001  torch lists them nowhere else
        for device in ("cuda", "xpu"):
            with contextlib.suppress(Exception):  # it has no such backend, or was aborted before
                group._get_backend(torch.device(device)).abort()  # noqa: SLF001


def _shut_down(agent_pid: int) -> int:
    theirs = {inode for pid in _peers(agent_pid) for inode, _ in _sockets(str(pid))}
    others = peers_of(descriptor for _, descriptor in _sockets("self"))
    return sum(_shut(descriptor) for descriptor, inode in others.items() if inode in theirs)


def _shut(descriptor: int) -> bool:
    """Shut one down; ``False``: it is closed by now, or dead."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as end:
            end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def _peers(agent_pid: int) -> list[int]:
    """The other ranks' processes; those that are dying are left out."""
    return [pid for pid in children(agent_pid) if pid != os.getpid() and _name(pid) != _STORE]


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return _STORE


def _sockets(process: str) -> Iterator[tuple[int, int]]:
    """Inode and descriptor of each socket that a process holds."""
    folder = f"/proc/{process}/fd"
    try:
        descriptors = os.listdir(folder)
    except OSError:
        return
    for name in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"{folder}/{name}")
            if target.startswith("socket:["):
                yield int(target[8:-1]), int(name)


FREE_S = 1.5  # for a thread whose sockets are gone; it takes milliseconds, at most groups.CONNECT

LOOK_S = 0.25  # between two looks at where it is


def end_if_stuck(is_out: threading.Event) -> None:
    """End this process if its main thread stays in a collective.

    Args:
        is_out: set when the main thread is out.
    """
    before = None
    patience_s = FREE_S
    while not is_out.wait(patience_s):
        patience_s = LOOK_S
        place = _place() if stacks.waits_for_peers() else None
        if place is not None and place == before:
            stacks.write("the main thread cannot be freed from a broken collective: it is killed")
            os.kill(os.getpid(), signal.SIGKILL)
        before = place


def _place() -> tuple[tuple[int, int], int] | None:
    """The main thread's instruction, and the processor time that it has had.

    A main thread that computes (a long backward) or spins until its device is done is not stuck.
    """
    instruction = stacks.main_instruction()
    stat = read_stat("self", threading.main_thread().native_id or "")
    return None if instruction is None or stat is None else (instruction, stat.own_ticks)
