"""Frees a main thread from a collective that a dead peer never joins.

NCCL's communicators can be aborted, see :mod:`communicators`. gloo's cannot: in torch 2.13 its
``abort`` returns and wakes nobody. But a rank that waits in gloo waits for bytes from the sockets
to its peers. If this process shuts these sockets down, the rank raises within milliseconds. gloo
then leaves garbage in its buffers, which are mostly gradient buckets; it does not touch parameters
and optimizers.

The connections to the attempt's store, which is over, are shut down, too: a rank that makes its
group may wait there for a peer that died. All other connections of a script are not touched: to a
database, or from rank to rank by torch's RPC or by sockets of its own.

gloo forgets threads whose bytes were on their way; they are woken, see :mod:`gloo_waiters`. A main
thread that even this does not free is killed with its process, and replaced like any other rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

from worker_hooks.contract.process_stat import read_stat
from worker_hooks.distributed import communicators, gloo_waiters, stacks, store_connection
from worker_hooks.distributed.gloo_sockets import gloo_sockets


def unblock(store: tuple[str, int]) -> int:
    """Break every connection of gloo's groups; return their count. Any thread may call this.

    Errors of a single connection or group are ignored: it is broken already.

    Args:
        store: address and port of the store that the ranks met at, to which none will return.
    """
    for backend in communicators.gloo_backends():
        with contextlib.suppress(Exception):  # aborted before; alone it wakes hardly anybody
            backend.abort()
    store_connection.shut_down(*store)
    return sum(map(_shut, gloo_sockets()))


def _shut(descriptor: int) -> bool:
    """Shut a socket down; ``False``: it is closed by now, dead, or listens."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as end:
            end.getpeername()
            end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


FREE_S = 1.5  # for a thread whose sockets are gone; it needs milliseconds, at most 0.2 s
LOOK_S = 0.25  # between two looks at the thread, at most
FIRST_LOOK_S = 0.03
FORGOTTEN_S = 0.15  # gloo has long raised in all threads but those that it forgets


def end_if_stuck(is_out: threading.Event, store: tuple[str, int]) -> None:
    """Free the main thread from a collective of gloo's, else end this process.

    Args:
        is_out: set when the main thread has left the training function.
        store: address and port of the store that the main thread may wait for.
    """
    before = None
    asleep: dict[gloo_waiters.Waiter, float] = {}  # and since when
    shut: set[int] = set()
    look_s = FIRST_LOOK_S
    free_s = time.monotonic() + FREE_S
    while not is_out.wait(look_s):
        look_s = min(2 * look_s, LOOK_S)
        now_s = time.monotonic()
        asleep = {each: asleep.get(each, now_s) for each in gloo_waiters.sleeping()}
        old = [each for each, since_s in asleep.items() if now_s >= since_s + FORGOTTEN_S]
        gloo_waiters.raise_in(old)
        found = store_connection.shut_down(*store)
        if found - shut or time.monotonic() < free_s:
            shut |= found  # it had connected once more to a store that nobody serves
            continue
        place = _place() if stacks.waits_for_peers() else None
        if place is not None and place == before:
            stacks.write("the main thread is inspected")
            stacks.end_process("the main thread cannot be freed from a broken collective")
        before = place


def _place() -> tuple[tuple[int, int], int] | None:
    """The main thread's instruction, and the processor time that it has had, if it sleeps.

    A main thread that computes (a long backward) or spins until its device is done is not stuck,
    nor is one that waits for a processor (R) or for the disk (D) on an overloaded machine.
    """
    instruction = stacks.main_instruction()
    stat = read_stat("self", os.getpid())
    if instruction is None or stat is None or stat.state != "S":
        return None
    return instruction, stat.own_ticks
