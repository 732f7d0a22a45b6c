"""The agent's end of the store host: one per attempt, made when the first worker knocks.

The listening socket is the agent's for the whole job. Before an attempt begins, the store host of
the attempt before is gone, so no worker can ever be answered by an old one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from enum import Enum

from worker_hooks import protocol

DEATHS = 3  # of store hosts in one attempt; then workers are left to their own time-outs
RETRY_S = 1.0


class Phase(Enum):
    """Where the store of the present attempt is on its way."""

    CLOSED = "closed"  # nobody answers
    LISTENING = "listening"  # the agent waits for the first worker
    ORDERED = "ordered"  # the forkserver was asked
    SERVING = "serving"


class Store:
    """One listening socket and the process that serves it."""

    def __init__(
        self, listener: socket.socket, loop: asyncio.AbstractEventLoop, knock: Callable[[], None]
    ) -> None:
        """``knock`` is called when a worker waits and no store host is there."""
        self.listener = listener
        self.pid = 0
        self._loop = loop
        self._knock = knock
        self._phase = Phase.CLOSED
        self._outdated = False  # ordered for an attempt that is over
        self._deaths = 0

    @property
    def is_changing(self) -> bool:
        """Whether the store host of an earlier attempt may still come up."""
        return self._outdated

    def begin(self) -> None:
        """Let a new attempt's workers knock."""
        self._deaths = 0
        if self._phase is Phase.ORDERED:
            self._outdated = True  # it will answer first, and is ended then
        else:
            self._listen()

    def _listen(self) -> None:
        self._outdated = False
        self._phase = Phase.LISTENING
        self._loop.add_reader(self.listener.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        self._loop.remove_reader(self.listener.fileno())
        self._phase = Phase.ORDERED
        self._knock()

    def on_forked(self, message: protocol.StoreForked) -> None:
        """The forkserver answered: the store host exists, or ``message.why``."""
        self.pid = message.pid
        if self._outdated:
            self.end()
            self._listen()
        elif self.pid:
            self._phase = Phase.SERVING
        else:
            self._lost()

    def on_exit(self) -> None:
        """The store host died and is being reaped."""
        self.pid = 0
        self._lost()

    def on_forkserver_gone(self) -> None:
        """An order on its way is lost with it."""
        if self._phase is Phase.ORDERED:
            self._lost()

    def _lost(self) -> None:
        """Who knocks from now on gets a new store host, unless they all die."""
        self._phase = Phase.CLOSED
        self._deaths += 1
        if self._outdated:
            self._listen()
        elif self._deaths <= DEATHS:
            # not at once: whoever waits in the queue makes the socket readable all the time
            self._loop.call_later(RETRY_S, self._listen_again)

    def _listen_again(self) -> None:
        if self._phase is Phase.CLOSED and self._deaths:
            self._listen()

    def end(self) -> None:
        """Stop listening; end the store host and wait until it is gone."""
        if self._phase is Phase.LISTENING:
            self._loop.remove_reader(self.listener.fileno())
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # our unreaped child: the pid is its own
            os.waitid(os.P_PID, self.pid, os.WEXITED)
            self.pid = 0
        if self._phase is not Phase.ORDERED or self._outdated:
            self._phase = Phase.CLOSED
        self._deaths = 0
