"""The agent's side of the store host: one per attempt, started when the first worker connects.

The agent keeps the listening socket for the whole job. Before an attempt begins, the store host of
the previous attempt is gone, so no worker can ever be answered by an old one.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from enum import Enum

from agent.workers.processes import end_child
from worker_hooks.contract import protocol

DEATHS = 3  # of store hosts in one attempt; then workers run into their own time-outs
RETRY_S = 1.0
END_S = 2.0  # for SIGKILL, which needs milliseconds


class StorePhase(Enum):
    """How far the store of the present attempt is."""

    CLOSED = "closed"  # nobody answers
    LISTENING = "listening"  # the agent waits for the first connection
    ORDERED = "ordered"  # the forkserver has the order
    OUTDATED = "outdated"  # it has an order of an attempt that is over; that answer comes first
    SERVING = "serving"


class StoreClient:
    """One listening socket and the process that serves it."""

    def __init__(
        self,
        listener: socket.socket,
        loop: asyncio.AbstractEventLoop,
        order: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        """Take the parts.

        Args:
            order: called when a worker has connected and there is no store host.
            give_up: called with the reason if none could be started in an attempt.
        """
        self.listener = listener
        self.pid = 0
        self._loop = loop
        self._order = order
        self._give_up = give_up
        self._has_served = False
        self._phase = StorePhase.CLOSED
        self._deaths = 0
        self._retry: asyncio.TimerHandle | None = None

    @property
    def is_serving(self) -> bool:
        """Whether workers of the present attempt have a store."""
        return self._phase is StorePhase.SERVING

    @property
    def is_ordered(self) -> bool:
        """Whether the forkserver owes a store host."""
        return self._phase in {StorePhase.ORDERED, StorePhase.OUTDATED}

    @property
    def is_changing(self) -> bool:
        """Whether the store host of an earlier attempt may still come up."""
        return self._phase is StorePhase.OUTDATED

    def begin(self, listener: socket.socket) -> None:
        """Wait for a new attempt's workers at this socket, which the caller keeps."""
        self._deaths, self._has_served = 0, False
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
        self._order()

    def order_now(self) -> None:
        """Order the store host now: it is known that workers will connect."""
        if self._phase is StorePhase.LISTENING:
            self._on_readable()

    def on_forked(self, message: protocol.StoreForked) -> None:
        """The forkserver answers: the store host exists and is our child, or ``message.why``."""
        if self._phase is StorePhase.OUTDATED:
            if message.pid:
                end_child(message.pid, END_S)
            self._listen()
        elif message.pid:
            self._cancel_retry()
            self.pid = message.pid
            self._phase, self._has_served = StorePhase.SERVING, True
        elif self._phase is StorePhase.ORDERED:  # else it introduced itself, and was killed at once
            self._lost()
            if self._deaths > DEATHS and not self._has_served:
                self._give_up(message.why)

    def on_exit(self) -> None:
        """The store host died and is being reaped."""
        self.pid = 0
        self._lost()

    def on_forkserver_gone(self) -> None:
        """The order that the forkserver had is lost with it."""
        if self._phase is StorePhase.OUTDATED:
            self._listen()
        elif self._phase is StorePhase.ORDERED:
            self._lost()

    def _lost(self) -> None:
        """Wait for connections again, unless too many store hosts have died."""
        self._phase = StorePhase.CLOSED
        self._deaths += 1
        if self._deaths <= DEATHS:
            # not at once: a waiting connection keeps the socket readable
            self._retry = self._loop.call_later(RETRY_S, self._listen)

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def end(self) -> None:
        """Kill the store host and wait until it is gone; an unanswered order stays ordered."""
        self._cancel_retry()
        if self._phase is StorePhase.LISTENING:
            self._loop.remove_reader(self.listener.fileno())
        if self.pid:
            end_child(self.pid, END_S)
            self.pid = 0
        self._phase = StorePhase.ORDERED if self.is_ordered else StorePhase.CLOSED
