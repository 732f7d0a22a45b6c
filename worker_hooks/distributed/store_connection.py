"""Connections to the ranks' store that can be given up.

While survivors make their group again, a second rank may die: then its store is never served, or
is gone. torch goes on trying to reach a store until the group's time-out (30 minutes for gloo), in
C++, where nothing can interrupt it. In short tries, with a question between two of them, it can be
given up, and the survivor meets its peers at the next store instead. A try that has a connection
waits for the store's answer without a limit, until the connection is shut down.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist

from worker_hooks.contract.env import AGENT_STORE

log = logging.getLogger("msrun")
CONNECT = timedelta(seconds=0.2)  # for the connection; the wait for an answer is longer
_MODULE = "torch.distributed.rendezvous"  # the attribute of this name is a function
_FACTORY = "_create_c10d_store"  # behind env:// and tcp://; torch has no public place
_RISK = "a second death while ranks meet may end all of them, and costs a restart"


def connect_in_short_tries(check: Callable[[], None]) -> None:
    """Reach stores in short tries from now on, whoever calls ``init_process_group``.

    Args:
        check: a bound method, called before each try; may raise, to give up. It is not kept alive.
    """
    rendezvous = sys.modules[_MODULE]
    original = getattr(rendezvous, _FACTORY, None)
    if original is None:
        log.warning("torch %s connects to stores in an unknown way: %s", torch.__version__, _RISK)
        return
    create: Callable[..., Any] = getattr(original, "original", original)
    checking = WeakMethod(check)

    def connect(
        host: str, port: int, rank: int, world_size: int, timeout: timedelta, *args: Any, **kw: Any
    ) -> Any:
        if os.environ.get(AGENT_STORE) != str(True):  # a rank hosts it, and waits for the others
            return create(host, port, rank, world_size, timeout, *args, **kw)
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            if (ask := checking()) is not None:
                ask()
            try:
                store = create(host, port, rank, world_size, min(CONNECT, timeout), *args, **kw)
            except dist.DistError:
                if time.monotonic() > deadline:
                    raise
            else:
                store.set_timeout(timeout)
                return store

    connect.original = create  # type: ignore[attr-defined]
    setattr(rendezvous, _FACTORY, connect)


def shut_down(address: str, port: int) -> set[int]:
    """Break this process's connections to a store that is of no use any more; return their inodes.

    What waits for its answer raises. Any thread may call this.
    """
    try:
        hosts = {each[4][0] for each in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)}
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return set()
    found = set()
    for name in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile, no socket, or not connected
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:[") and _shut(int(name), hosts, port):
                found.add(int(target[8:-1]))
    return found


def _shut(descriptor: int, hosts: set[Any], port: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as end:
        if end.family not in {socket.AF_INET, socket.AF_INET6}:
            return False
        host, remote, *_ = end.getpeername()
        if remote != port or host.removeprefix("::ffff:") not in hosts:
            return False
        end.shutdown(socket.SHUT_RDWR)
    return True
