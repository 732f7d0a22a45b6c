"""Brings an attempt's workers to life: the forkserver and the store host, whatever becomes of them.

The forkserver may be late, unfit or killed; who was ordered and not forked is then forked by the
next one. Nobody is ordered while a store host of an earlier attempt could still answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection

from agent.records.journal import Journal
from agent.workers.forkserver_client import ForkserverClient
from agent.workers.master_port import beside
from agent.workers.processes import end_child
from agent.workers.store_client import StoreClient
from worker_hooks.contract import protocol, wire

DEATHS = 5  # of forkservers in one attempt; then starts fail instead of being tried again
END_S = 2.0  # for SIGKILL, which needs milliseconds
WARM_UP_S = 3.0  # after the last rank's start: the workers' own beginnings come first

Answer = protocol.Forked | protocol.ForkFailed


class Starter:
    """The forkserver, the store host, and the orders that wait for them."""

    def __init__(
        self,
        forkserver: ForkserverClient,
        listener: socket.socket,
        journal: Journal,
        say: Callable[[str], None],
        sent: tuple[protocol.WorkerOrder, ...] = (),
    ) -> None:
        """``sent``: workers of attempt 0 that the forkserver was told to start already."""
        self._forkserver = forkserver
        self._listener = listener  # on MASTER_PORT
        self._present = listener  # of this attempt
        self._journal = journal
        self._say = say
        self._orders: tuple[protocol.WorkerOrder, ...] = ()  # waiting
        self._sent = {order.rank: order for order in sent}  # not answered yet
        self._ahead: dict[int, protocol.WorkerOrder] = {}  # the same, of an attempt not begun
        self._reserved: tuple[int, socket.socket] | None = None  # that attempt, and where it meets
        self._attempt = 0
        self._keeps = False  # some workers of attempts before live on
        self._deaths = 0
        self._guarded: list[int] = []  # processes that must have time to save if the agent dies
        self._told = 0  # how many of them the forkserver knows
        self._is_hurried = False  # the store of this attempt will be wanted
        self._warming: asyncio.TimerHandle | None = None

    def attach(self, loop: asyncio.AbstractEventLoop, answer: Callable[[Answer], None]) -> None:
        """Listen on ``loop``; ``answer`` hears of every ordered worker once, alive or not."""
        self._loop = loop
        self._answer = answer
        self._store = StoreClient(self._listener, loop, self._on_knock)
        self._watch()

    @property
    def is_ready(self) -> bool:
        """Whether the forkserver has imported what it was told to."""
        return self._forkserver.ready

    @property
    def spared(self) -> frozenset[int]:
        """Our children that a sweep must leave alone."""
        return frozenset({self._forkserver.pid} if self._forkserver.link is not None else ())

    def start(self, attempt: int, orders: tuple[protocol.WorkerOrder, ...]) -> None:
        """Order an attempt's workers, with a fresh store for them."""
        self._attempt, self._keeps = attempt, False
        self._guarded.clear()  # the forkserver forgets them with the first order of a new attempt
        self._told = 0
        self._store.begin(self._settle_at(self._listener))
        if not self._sent:  # the first attempt's were on their way before we were
            self._begin(orders)

    def renew(self, attempt: int, survivors: Collection[int]) -> None:
        """A new attempt begins with a fresh store, and these processes of the last one live on.

        Starts of the last attempt that were ordered and not announced are forgotten.
        """
        is_wanted = self._store.is_serving
        self._store.end()
        told = [pid for pid in self._guarded[: self._told] if pid in survivors]
        untold = [pid for pid in self._guarded[self._told :] if pid in survivors]
        self._guarded, self._told = told + untold, len(told)
        self._attempt, self._keeps = attempt, True
        unsent = {order.rank for order in self._forkserver.recall()}
        ahead, listener = self._take_ahead(attempt)
        self._orders = tuple(order for order in ahead.values() if order.rank in unsent)
        self._sent = {rank: order for rank, order in ahead.items() if rank not in unsent}
        # a survivor that is late to leave may yet come to where it met the ranks of before
        self._store.begin(self._settle_at(listener))
        self._is_hurried = is_wanted

    def reserve(self, attempt: int) -> int:
        """The port at which the ranks of an attempt would meet; 0: nobody can be started now."""
        is_busy = self._orders or self._sent or self._ahead or self._store.is_changing
        if is_busy or not self._forkserver.ready:
            return 0
        self._drop_reserved()
        listener = beside(self._listener)
        if listener is self._listener:
            return 0
        self._reserved = attempt, listener
        return int(listener.getsockname()[1])

    def order_ahead(self, orders: tuple[protocol.WorkerOrder, ...]) -> None:
        """Order newcomers of the attempt that :meth:`reserve` was asked for."""
        assert self._reserved is not None
        self._ahead = {order.rank: order for order in orders}
        with contextlib.suppress(OSError):  # it is gone: its link says so
            self._forkserver.order(self._reserved[0], orders, keeps=True)

    def _take_ahead(self, attempt: int) -> tuple[dict[int, protocol.WorkerOrder], socket.socket]:
        """Who was ordered ahead for this attempt and not answered yet, and where it is to meet."""
        ahead, self._ahead = self._ahead, {}
        if self._reserved is None or self._reserved[0] != attempt:
            self._drop_reserved()
            return {}, beside(self._listener)
        listener, self._reserved = self._reserved[1], None
        return ahead, listener

    def _drop_reserved(self) -> None:
        if self._reserved is not None:
            self._reserved[1].close()
            self._reserved = None

    @property
    def port(self) -> int:
        """Where the ranks of this attempt meet."""
        return int(self._present.getsockname()[1])

    def _settle_at(self, listener: socket.socket) -> socket.socket:
        if self._present not in {self._listener, listener}:
            self._present.close()
        self._present = listener
        return listener

    def add(self, orders: tuple[protocol.WorkerOrder, ...]) -> None:
        """Order the newcomers of an attempt that was renewed, but those that were ahead."""
        self._begin((*self._orders, *orders))
        if self._is_hurried and self._forkserver.ready:
            self._store.hasten()  # while they come to life

    def _begin(self, orders: tuple[protocol.WorkerOrder, ...]) -> None:
        self._deaths = 0
        self._orders = orders
        if self._forkserver.link is None:
            self._restart("it was given up in the attempt before")
        self._send()

    def cancel(self, why: str, *, now: bool) -> None:
        """Call off the starts that have not happened.

        What was sent is answered by the forkserver in milliseconds, unless it is stuck: with
        ``now`` it is ended, and whoever it has not forked never starts.
        """
        for order in self._forkserver.recall():
            self._orders += (self._sent.pop(order.rank, order),)
        if now and self._sent:
            self._orders += tuple(self._sent.values())
            self._sent = {}
            self._over(f"called off: {why}", kill=True)
        self._refuse(f"called off: {why}")

    def end_attempt(self) -> None:
        """End the store host and wait until it is gone; nobody ordered ahead comes any more."""
        if self._warming is not None:
            self._warming.cancel()
            self._warming = None
        if self._ahead:  # not even forked; of the next attempt's, nobody could tell them then
            self._over("newcomers are called off", kill=True, is_fit=True)
        self._drop_reserved()
        self._store.end()

    def warm_up(self) -> None:
        """Import what a restart will want, once the workers had their time to begin."""
        if self._warming is None:
            self._warming = self._loop.call_later(WARM_UP_S, self._warm_up)

    def _warm_up(self) -> None:
        with contextlib.suppress(OSError):  # it is gone: its link says so
            self._forkserver.warm_up()

    def spare(self, pid: int) -> None:
        """If the agent dies, leave this process its time to save."""
        if pid not in self._guarded:  # a survivor may register again
            self._guarded.append(pid)
            self._tell_guarded()

    def _tell_guarded(self) -> None:
        link = self._forkserver.link
        if link is None:
            return
        try:
            while self._told < len(self._guarded):
                self._forkserver.spare(self._guarded[self._told])
                self._told += 1
        except BlockingIOError:
            self._loop.add_writer(link, self._tell_guarded)  # it imports, and reads later
            return
        except OSError:
            pass  # it is gone: its link says so, and the next one is told
        self._loop.remove_writer(link)

    def close(self) -> None:
        """The job is over: the forkserver hears it from the closed link."""
        self._drop_reserved()
        self._unwatch()
        self._forkserver.forget()
        self._settle_at(self._listener)

    def is_store(self, pid: int) -> bool:
        """Whether ``pid`` is the store host."""
        return pid == self._store.pid

    def on_store_exit(self, exit_code: int) -> None:
        """The store host died and is being reaped."""
        self._journal.event("StoreHostExited", exit_code=exit_code)
        self._store.on_exit()

    def hear(self) -> None:
        """Take in all that the forkserver has said."""
        heard = self._forkserver
        if heard.link is None or heard.hear(self._on_message):
            return
        if heard.link is not None:  # else it was given up for what it said
            self._over("the forkserver died", kill=False)
            self._restart("the forkserver died")
            self._send()

    def _on_message(self, message: protocol.Message) -> None:
        match message:
            case protocol.Ready():
                self._journal.event("ForkserverReady", **message._asdict())
                if message.problem:
                    self._say(f"workers start cold: {message.problem}")
                    self._over(message.problem, kill=True)
                    self._restart(message.problem)
                self._send()
            case protocol.Forked() | protocol.ForkFailed():
                if message.attempt == self._attempt:
                    self._sent.pop(message.rank, None)
                elif self._reserved is not None and message.attempt == self._reserved[0]:
                    self._ahead.pop(message.rank, None)
                self._answer(message)
            case protocol.StoreForked():
                self._journal.event("StoreForked", **message._asdict())
                if message.why:
                    self._say(f"no store for the workers on MASTER_PORT: {message.why}")
                self._store.on_forked(message)
                self._send()
            case _:
                raise wire.ProtocolError(f"not for an agent: {message}")

    def _send(self) -> None:
        """Order who waits, once the forkserver is ready and no old store can answer."""
        if not self._orders or not self._forkserver.ready or self._store.is_changing:
            return
        orders, self._orders = self._orders, ()
        self._sent.update({order.rank: order for order in orders})
        with contextlib.suppress(OSError):  # it is gone: its link says so, and they stay owed
            self._forkserver.order(self._attempt, orders, keeps=self._keeps)

    def _over(self, why: str, *, kill: bool, is_fit: bool = False) -> None:
        """Give the forkserver up: what it owed waits for the next, which may have to be cold."""
        useless = not is_fit and (kill or not self._forkserver.ready or self._deaths > 0)
        self._unwatch()
        if kill:
            end_child(self._forkserver.pid, END_S)
        self._forkserver.forget()
        self._orders += tuple(self._sent.values())
        self._sent = {}
        self._forget_ahead(why)
        self._deaths += 1
        owed = [order.rank for order in self._orders]
        self._journal.event("ForkserverEnded", reason=why, owed=owed)
        self._store.on_forkserver_gone()
        if useless and self._forkserver.warmth is not None:
            self._forkserver = self._forkserver.cooled()

    def _forget_ahead(self, why: str) -> None:
        """They are ordered again if they are wanted after all."""
        ahead, self._ahead = self._ahead, {}
        if self._reserved is not None:
            for rank in ahead:
                self._answer(protocol.ForkFailed(rank, self._reserved[0], why))

    def _restart(self, why: str) -> None:
        if self._deaths > DEATHS:
            self._refuse(f"{why}, {self._deaths} times")
            return
        try:
            self._forkserver.start()
        except OSError as error:
            self._refuse(f"no forkserver: {error.strerror}")
            return
        self._journal.event("ForkserverStarted", pid=self._forkserver.pid, reason=why)
        self._watch()
        self._told = 0
        self._tell_guarded()

    def _refuse(self, why: str) -> None:
        refused, self._orders = self._orders, ()
        for order in refused:
            self._answer(protocol.ForkFailed(order.rank, self._attempt, why))

    def _on_knock(self) -> None:
        """The first worker of an attempt connects to MASTER_PORT."""
        try:
            self._forkserver.order_store(self._attempt, self._present)
        except OSError:
            self._store.on_forkserver_gone()

    def _watch(self) -> None:
        if self._forkserver.link is not None:
            self._loop.add_reader(self._forkserver.link.fileno(), self.hear)

    def _unwatch(self) -> None:
        if self._forkserver.link is not None:
            self._loop.remove_reader(self._forkserver.link.fileno())
            self._loop.remove_writer(self._forkserver.link.fileno())
