"""Starts an attempt's workers: it manages the forkserver and the store host.

The forkserver may be late, unfit, killed, or stopped by a signal; workers that it did not fork are
then forked by the next one. No worker is ordered while a store host of an earlier attempt could
still answer it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection, Mapping

from agent.records.journal import Journal
from agent.workers.forkserver_client import ForkserverClient
from agent.workers.master_port import second_listener
from agent.workers.processes import end_child, is_stopped
from agent.workers.store_client import StoreClient
from worker_hooks.contract import protocol, wire
from worker_hooks.contract.env import met_at

DEATHS = 5  # of forkservers in one attempt; then starts fail and are not tried again
END_S = 2.0  # for SIGKILL, which needs milliseconds
LOOK_S = 1.0  # between two looks at a forkserver that owes an answer
STOPPED_LOOKS = 3  # in a row at which it is stopped by a signal, until it is given up
STOPPED = "the forkserver is stopped by a signal and starts no rank"
WARM_UP_S = 3.0  # after the last rank's start: the workers' own start-up comes first

Answer = protocol.Forked | protocol.ForkFailed


class Starter:
    """The forkserver, the store host, and the orders to them."""

    def __init__(
        self,
        forkserver: ForkserverClient,
        listener: socket.socket,
        journal: Journal,
        say: Callable[[str], None],
        sent: tuple[protocol.WorkerOrder, ...] = (),
    ) -> None:
        """``sent``: workers of attempt 0 that the forkserver has been ordered to start."""
        self._forkserver = forkserver
        self._listener = listener  # on MASTER_PORT
        self._present = listener  # where the workers of this attempt meet
        self._journal = journal
        self._say = say
        self._orders: tuple[protocol.WorkerOrder, ...] = ()  # not sent yet
        self._sent = {order.rank: order for order in sent}  # not answered yet
        self._prestarted: dict[int, protocol.WorkerOrder] = {}  # sent for an attempt not begun
        self._reserved: tuple[int, socket.socket] | None = None  # that attempt, and its listener
        self.port_elsewhere = 0
        """Of the store of this or the next attempt, if that is on another node."""
        self.moved: Mapping[str, str] = {}
        """Variables that name where ranks meet, if that is another place than at the beginning."""
        self._is_host = False  # since the node that was is lost
        self._attempt = 0
        self._keeps = False  # some workers of earlier attempts are alive
        self._deaths = 0
        self._protected: list[int] = []  # pids that must have time to save if the agent dies
        self._announced = 0  # how many of them the forkserver knows
        self._wants_store = False  # this attempt will certainly use its store
        self._warming: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._stopped = 0  # looks in a row at which it was stopped
        self._is_kept = False  # the forkserver outlives this object

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        answer: Callable[[Answer], None],
        refuse: Callable[[str], None],
    ) -> None:
        """Listen on ``loop``.

        Args:
            answer: called once for every ordered worker, alive or not.
            refuse: called if workers that run can never meet.
        """
        self._loop = loop
        self._answer = answer

        def give_up(why: str) -> None:
            refuse(f"no store for the workers on MASTER_PORT can be started: {why}")

        self._store = StoreClient(self._listener, loop, self._on_connection, give_up)
        self._watch()
        self._look_after()

    @property
    def is_ready(self) -> bool:
        """Whether the forkserver has imported what it was ordered to."""
        return self._forkserver.ready

    @property
    def spared(self) -> frozenset[int]:
        """Children that a sweep must not kill."""
        return frozenset({self._forkserver.pid} if self._forkserver.link is not None else ())

    def meet_at(self, port: int) -> None:
        """The ranks of the next attempt meet at this port of the node that has the stores."""
        if not self._is_host:
            self.port_elsewhere = port

    def move(self, port: int, host: str) -> None:
        """The stores are on another node from the next attempt on.

        Args:
            port: where the ranks of an attempt meet in which all are started.
            host: which machine that is.
        """
        if not self._is_host:
            self.port_elsewhere, self.moved = port, met_at(port, host)

    def take_stores(self, listener: socket.socket, host: str) -> int:
        """The stores are on this node from the next attempt on.

        The calls that begin an attempt may come twice then, first from who decides for all nodes.

        Args:
            listener: where the ranks of all nodes reach this one.
            host: this machine, for those here.

        Returns:
            The port at which the ranks of an attempt meet in which all are started.
        """
        self._is_host, self._listener, self.port_elsewhere = True, listener, 0
        port = int(listener.getsockname()[1])
        self.moved = met_at(port, host)
        return port

    def start(self, attempt: int, orders: tuple[protocol.WorkerOrder, ...]) -> None:
        """Order an attempt's workers, with a fresh store for them."""
        self._attempt, self._keeps = attempt, False
        self._protected.clear()  # the forkserver forgets them with the first order of a new attempt
        self._announced = 0
        self._store.begin(self._use_listener(self._listener))
        if not self._sent:  # those of the first attempt were sent before this object existed
            self._begin(orders)

    def renew(self, attempt: int, survivors: Collection[int]) -> None:
        """A new attempt begins with a fresh store; these processes of the last one stay alive.

        Unanswered orders of the last attempt are forgotten.
        """
        if self._is_host and attempt == self._attempt:
            return
        is_wanted = self._store.is_serving
        self._store.end()
        known = [pid for pid in self._protected[: self._announced] if pid in survivors]
        unknown = [pid for pid in self._protected[self._announced :] if pid in survivors]
        self._protected, self._announced = known + unknown, len(known)
        self._attempt, self._keeps = attempt, True
        unsent = {order.rank for order in self._forkserver.recall()}
        prestarted, listener = self._take_prestarted(attempt)
        self._orders = tuple(order for order in prestarted.values() if order.rank in unsent)
        self._sent = {rank: order for rank, order in prestarted.items() if rank not in unsent}
        # a survivor that leaves its group late may still connect to the old port
        self._store.begin(self._use_listener(listener))
        self._wants_store = is_wanted or self._is_host

    def reserve(self, attempt: int) -> int:
        """The port at which the ranks of an attempt would meet; 0: none can be started now."""
        if self._is_host and self._reserved is not None and self._reserved[0] == attempt:
            return self.reserved_port
        is_busy = self._orders or self._sent or self._prestarted or self._store.is_changing
        if is_busy or not self._forkserver.ready:
            return 0
        self._drop_reserved()
        listener = second_listener(self._listener)
        if listener is self._listener:
            return 0
        self._reserved = attempt, listener
        return self.port_elsewhere or int(listener.getsockname()[1])

    @property
    def reserved_port(self) -> int:
        """The port that was reserved; 0: none is."""
        return 0 if self._reserved is None else int(self._reserved[1].getsockname()[1])

    def prestart(self, orders: tuple[protocol.WorkerOrder, ...]) -> None:
        """Order replacements for the attempt that :meth:`reserve` was called for."""
        assert self._reserved is not None
        self._prestarted = {order.rank: order for order in orders}
        with contextlib.suppress(OSError):  # it is gone: its link reports that
            self._forkserver.order(self._reserved[0], orders, keeps=True)
        self._look_after()

    def _take_prestarted(
        self, attempt: int
    ) -> tuple[dict[int, protocol.WorkerOrder], socket.socket]:
        """The unanswered prestarts for this attempt, and the listener they will meet at."""
        prestarted, self._prestarted = self._prestarted, {}
        if self._reserved is None or self._reserved[0] != attempt:
            self._drop_reserved()
            return {}, second_listener(self._listener)
        listener, self._reserved = self._reserved[1], None
        return prestarted, listener

    def _drop_reserved(self) -> None:
        if self._reserved is not None:
            self._reserved[1].close()
            self._reserved = None

    @property
    def port(self) -> int:
        """The port at which the ranks of this attempt meet."""
        return self.port_elsewhere or int(self._present.getsockname()[1])

    def _use_listener(self, listener: socket.socket) -> socket.socket:
        if self._present not in {self._listener, listener}:
            self._present.close()
        self._present = listener
        return listener

    def add(self, orders: tuple[protocol.WorkerOrder, ...]) -> None:
        """Order the replacements that are not prestarted; the attempt was renewed."""
        self._begin((*self._orders, *orders))
        if self._wants_store and self._forkserver.ready:
            self._store.order_now()  # while they start

    def _begin(self, orders: tuple[protocol.WorkerOrder, ...]) -> None:
        self._deaths = 0
        self._orders = orders
        if self._forkserver.link is None:
            self._restart("it was given up in the previous attempt")
        self._send()

    def cancel(self, why: str, *, now: bool) -> None:
        """Cancel the starts that have not happened.

        The forkserver answers in milliseconds, unless it is stuck: with ``now`` it is killed, and
        a worker that it has not forked never starts.
        """
        for order in self._forkserver.recall():
            self._orders += (self._sent.pop(order.rank, order),)
        if now and self._sent:
            self._give_up(f"called off: {why}", kill=True)
        self._refuse(f"called off: {why}")

    def end_attempt(self) -> None:
        """Kill the store host and wait until it is gone; no prestarted worker appears any more."""
        if self._warming is not None:
            self._warming.cancel()
            self._warming = None
        if self._prestarted:  # not even forked: the next attempt could not tell them from its own
            self._give_up("replacements are called off", kill=True, is_fit=True)
        self._drop_reserved()
        self._store.end()

    def warm_up(self) -> None:
        """Import what a restart will need, once the workers have had time to start."""
        if self._warming is None:
            self._warming = self._loop.call_later(WARM_UP_S, self._warm_up)

    def _warm_up(self) -> None:
        with contextlib.suppress(OSError):  # it is gone: its link reports that
            self._forkserver.warm_up()

    def protect(self, pid: int) -> None:
        """Let this process have time to save if the agent dies."""
        if pid not in self._protected:  # a survivor may register again
            self._protected.append(pid)
            self._announce()

    def _announce(self) -> None:
        link = self._forkserver.link
        if link is None:
            return
        try:
            while self._announced < len(self._protected):
                self._forkserver.protect(self._protected[self._announced])
                self._announced += 1
        except BlockingIOError:
            self._loop.add_writer(link, self._announce)  # it is importing, and will read later
            return
        except OSError:
            pass  # it is gone: its link reports that, and the next one will be told
        self._loop.remove_writer(link)

    def keep(self) -> bool:
        """Have :meth:`close` leave the forkserver to another run; whether it is fit for that."""
        is_fit = self._forkserver.ready and not self._is_owed and not self._store.is_changing
        self._is_kept = is_fit and not is_stopped(self._forkserver.pid)
        return self._is_kept

    def close(self) -> None:
        """The job is over: the closed link tells the forkserver."""
        if self._looking is not None:
            self._looking.cancel()
        self._drop_reserved()
        self._unwatch()
        if not self._is_kept:
            self._forkserver.forget()
        self._use_listener(self._listener)
        if self._is_host:
            self._listener.close()

    def kept(self) -> ForkserverClient | None:
        """The forkserver, which may start the ranks of another run; ``None``: it is gone."""
        if self._is_kept and self._forkserver.link is not None:
            with contextlib.suppress(OSError):
                self._forkserver.begin_anew()
                return self._forkserver
            self._forkserver.forget()  # else it would stay beside the next one
        return None

    def is_store(self, pid: int) -> bool:
        """Whether ``pid`` is the store host."""
        return pid == self._store.pid

    def on_store_exit(self, exit_code: int) -> None:
        """The store host died and is being reaped."""
        self._journal.event("StoreHostExited", exit_code=exit_code)
        self._store.on_exit()

    def receive(self) -> None:
        """Handle every message that the forkserver has sent."""
        sender = self._forkserver
        if sender.link is None or sender.receive(self._on_message):
            return
        if sender.link is not None:  # else it was given up because of a message
            self._give_up("the forkserver died", kill=False)
            self._restart("the forkserver died")
            self._send()

    def _on_message(self, message: protocol.Message) -> None:
        match message:
            case protocol.Ready():
                self._journal.event("ForkserverReady", **message._asdict())
                if message.problem:
                    self._say(f"workers start cold: {message.problem}")
                    self._give_up(message.problem, kill=True)
                    self._restart(message.problem)
                self._send()
            case protocol.Forked() | protocol.ForkFailed():
                if message.attempt == self._attempt:
                    self._sent.pop(message.rank, None)
                elif self._reserved is not None and message.attempt == self._reserved[0]:
                    self._prestarted.pop(message.rank, None)
                self._answer(message)
            case protocol.StoreForked():
                self._journal.event("StoreForked", **message._asdict())
                # one that introduced itself and was killed at once is answered for again
                if message.attempt == self._attempt or self._store.is_changing:
                    self._store.on_forked(message)
                self._send()
            case _:
                raise wire.ProtocolError(f"not for an agent: {message}")

    def _send(self) -> None:
        """Send the orders, once the forkserver is ready and no old store host can answer."""
        self._look_after()
        if not self._orders or not self._forkserver.ready or self._store.is_changing:
            return
        orders, self._orders = self._orders, ()
        self._sent.update({order.rank: order for order in orders})
        with contextlib.suppress(OSError):  # it is gone: its link reports that; they stay owed
            self._forkserver.order(self._attempt, orders, keeps=self._keeps)

    @property
    def _is_owed(self) -> bool:
        """Whether something waits for the forkserver."""
        return bool(self._orders or self._sent or self._prestarted or self._store.is_ordered)

    def _look_after(self) -> None:
        """As long as the forkserver owes an answer, look whether it can run at all."""
        if self._looking is None and self._is_owed:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = None
        is_stopped_now = self._forkserver.link is not None and is_stopped(self._forkserver.pid)
        self._stopped = self._stopped + 1 if self._is_owed and is_stopped_now else 0
        if self._stopped >= STOPPED_LOOKS:
            self._stopped = 0
            self._say(f"{STOPPED}: msrun kills it and starts another")
            self._give_up(STOPPED, kill=True, is_fit=True)
            self._restart(STOPPED)
            self._send()
        self._look_after()

    def _give_up(self, why: str, *, kill: bool, is_fit: bool = False) -> None:
        """Give the forkserver up: its orders wait for the next one, which may have to be cold."""
        useless = not is_fit and (kill or not self._forkserver.ready or self._deaths > 0)
        self._unwatch()
        if kill:
            end_child(self._forkserver.pid, END_S)
        self._forkserver.take_last(self._on_message)
        self._forkserver.forget()
        self._orders += tuple(self._sent.values())
        self._sent = {}
        self._fail_prestarted(why)
        self._deaths += 1
        owed = [order.rank for order in self._orders]
        self._journal.event("ForkserverEnded", reason=why, owed=owed)
        self._store.on_forkserver_gone()
        if useless and self._forkserver.warmth is not None:
            self._forkserver = self._forkserver.cooled()

    def _fail_prestarted(self, why: str) -> None:
        """Answer for the prestarted workers: they are ordered again if they are needed."""
        prestarted, self._prestarted = self._prestarted, {}
        if self._reserved is not None:
            for rank in prestarted:
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
        self._announced = 0
        self._announce()

    def _refuse(self, why: str) -> None:
        refused, self._orders = self._orders, ()
        for order in refused:
            self._answer(protocol.ForkFailed(order.rank, self._attempt, why))

    def _on_connection(self) -> None:
        """The first worker of an attempt connects to MASTER_PORT."""
        try:
            self._forkserver.order_store(self._attempt, self._present)
        except OSError:
            self._store.on_forkserver_gone()
        self._look_after()

    def _watch(self) -> None:
        if self._forkserver.link is not None:
            self._loop.add_reader(self._forkserver.link.fileno(), self.receive)

    def _unwatch(self) -> None:
        if self._forkserver.link is not None:
            self._loop.remove_reader(self._forkserver.link.fileno())
            self._loop.remove_writer(self._forkserver.link.fileno())
