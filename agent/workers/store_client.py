"""The agent's end of the store host: one per attempt, made when the first worker knocks.

The listening socket is the agent's for the whole job. Before an attempt begins, the store host of
the attempt before is gone, so no worker can ever be answered by an old one.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from enum import Enum

from agent.workers.processes import end_child
from worker_hooks.contract import protocol

DEATHS = 3  # of store hosts in one attempt; then workers are left to their own time-outs
RETRY_S = 1.0
END_S = 2.0  # for SIGKILL, which needs milliseconds


class StorePhase(Enum):
    """Where the store of the present attempt is on its way."""

    CLOSED = "closed"  # nobody answers
    LISTENING = "listening"  # the agent waits for the first worker
    ORDERED = "ordered"  # the forkserver was asked
    OUTDATED = "outdated"  # it was asked for an attempt that is over; its answer comes first
    SERVING = "serving"


class StoreClient:
    """One listening socket and the process that serves it."""

    def __init__(
        self, listener: socket.socket, loop: asyncio.AbstractEventLoop, knock: Callable[[], None]
    ) -> None:
        """``knock`` is called when a worker waits and no store host is there."""
        self.listener = listener
        self.pid = 0
        self._loop = loop
        self._knock = knock
        self._phase = StorePhase.CLOSED
        self._deaths = 0
        self._retry: asyncio.TimerHandle | None = None

    @property
    def is_serving(self) -> bool:
        """Whether workers of the present attempt have a store."""
        return self._phase is StorePhase.SERVING

    @property
    def is_changing(self) -> bool:
        """Whether the store host of an earlier attempt may still come up."""
        return self._phase is StorePhase.OUTDATED

    def begin(self, listener: socket.socket) -> None:
        """Let a new attempt's workers knock at this socket, which stays the caller's."""
        self._deaths = 0
        self.listener = listener
        if self._phase is StorePhase.ORDERED:
            self._phase = StorePhase.OUTDATED
        else:
            self._listen()

    def _listen(self) -> None:
        self._phase = StorePhase.LISTENING
        self._loop.add_reader(self.listener.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        self._loop.remove_reader(self.listener.fileno())
        self._phase = StorePhase.ORDERED
        self._knock()

    def hasten(self) -> None:
        """Have the store host made now: it is known that workers will want one."""
        if self._phase is StorePhase.LISTENING:
            self._on_readable()

    def on_forked(self, message: protocol.StoreForked) -> None:
        """The forkserver answered: the store host exists and is our child, or ``message.why``."""
        if self._phase is StorePhase.OUTDATED:
            end_child(message.pid, END_S)
            self._listen()
        elif message.pid:
            self.pid = message.pid
            self._phase = StorePhase.SERVING
        else:
            self._lost()

    def on_exit(self) -> None:
        """The store host died and is being reaped."""
        self.pid = 0
        self._lost()

    def on_forkserver_gone(self) -> None:
        """An order on its way is lost with it."""
        if self._phase is StorePhase.OUTDATED:
            self._listen()
        elif self._phase is StorePhase.ORDERED:
            self._lost()

    def _lost(self) -> None:
        """Who knocks from now on gets a new store host, unless they all die."""
        self._phase = StorePhase.CLOSED
        self._deaths += 1
        if self._deaths <= DEATHS:
            # not at once: whoever waits in the queue makes the socket readable all the time
            self._retry = self._loop.call_later(RETRY_S, self._listen)

    def end(self) -> None:
        """End the store host and wait until it is gone; an order on its way stays ordered."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._phase is StorePhase.LISTENING:
            self._loop.remove_reader(self.listener.fileno())
        if self.pid:
            end_child(self.pid, END_S)
            self.pid = 0
        awaited = self._phase in {StorePhase.ORDERED, StorePhase.OUTDATED}
        self._phase = StorePhase.ORDERED if awaited else StorePhase.CLOSED
