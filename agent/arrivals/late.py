"""Who connects after the job has begun: a node gets a lost one's place, waits, or hears why not."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from agent.arrivals.store_relay import HELLO, NO_NODE, NOT_BY_TLS, Store, StoreRelay, is_of_node
from agent.nodes.guest import ANSWER_S, Guest, StrangerError
from agent.nodes.line import LIMIT_S, Line, bytes_of, set_options
from agent.nodes.messages import (
    Admitted,
    Begin,
    Join,
    Newer,
    Refused,
    Spare,
    StillThere,
    StopGathering,
)
from agent.nodes.tls import PLAIN, Security

MOST_GUESTS = 64  # at once; the oldest makes room
PATIENCE_S = 1.0  # that a guest has in any case, however many others knock
RETRY_S = 1.0  # after descriptors ran out

Loop = asyncio.AbstractEventLoop


class NodePlace(NamedTuple):
    """What a node is told that takes part from now on."""

    node_rank: int
    begin: Begin


Judge = Callable[[Join, str], NodePlace | Spare | Refused]


class LateGuests:
    """Answers whoever connects to ``listener``, which stays the caller's."""

    def __init__(
        self,
        listener: socket.socket,
        version: str,
        token: bytes,
        security: Security = PLAIN,
        limit_s: float = LIMIT_S,
    ) -> None:
        """Take the parts; nobody is answered before :meth:`attach`.

        Args:
            token: the job's; empty: none.
            security: of the connections.
            limit_s: of the silence of those that are let in.
        """
        self._limit_s = limit_s
        self._security = security
        listener.setblocking(False)
        self._listener = listener
        self._version = version
        self._token = token
        self._guests: dict[Guest, asyncio.TimerHandle] = {}
        self._spares: dict[Guest, Join] = {}  # those that wait longest first
        self._retry: asyncio.TimerHandle | None = None
        self._is_full = False  # nobody is let in until a guest has gone, or had its moment
        self._relay = StoreRelay()
        self.store: Store | None = None
        """Of the ranks; ``None``: there is none yet."""
        self._said: set[str] = set()  # why somebody was not led there
        self.refused = 0  # nodes
        self.strangers = 0

    def attach(self, loop: Loop, judge: Judge, admitted: Callable[[int, Line], None]) -> None:
        """Answer on ``loop``; called again: those that wait are somebody else's now.

        Args:
            loop: msrun's.
            judge: decides about a node at an address that has proved to belong to the job.
            admitted: takes the line to a node that has got a place, and its rank.
        """
        self._loop, self._judge, self._admitted = loop, judge, admitted
        self._listen()

    def _listen(self) -> None:
        self._is_full = False
        self._loop.add_reader(self._listener, self._let_in)

    def _forget(self, guest: Guest) -> None:
        """It is no guest any more: there is room for another one."""
        if timer := self._guests.pop(guest, None):
            timer.cancel()
        if self._is_full and self._retry is not None:
            self._retry.cancel()
            self._listen()

    def seat(self) -> None:
        """A place is free: judge the spare nodes once more."""
        for guest, join in tuple(self._spares.items()):
            answer = self._judge(join, guest.address)
            if isinstance(answer, NodePlace):
                del self._spares[guest]
                self._admit(guest, answer)

    def tell_spares(self, message: Spare | StillThere) -> None:
        """Tell it all that wait."""
        for guest in self._spares:
            guest.say(bytes_of(message))

    @property
    def waiting(self) -> tuple[Join, ...]:
        """Those that wait, the first that came first."""
        return tuple(self._spares.values())

    def close(self, farewell: Refused | None) -> None:
        """Answer nobody any more.

        ``farewell``: for the spare nodes; ``None``: they are to ask once more.
        """
        self._is_full = False
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        for guest in tuple(self._spares):
            if farewell is not None:
                guest.refuse(farewell)
            self._drop(guest)
        for guest in tuple(self._guests):
            self._drop(guest)
        self._relay.close()

    def _pause(self, seconds: float) -> None:
        """Let nobody in for a while; the kernel keeps who comes."""
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(seconds, self._listen)

    def _let_in(self) -> None:
        if len(self._guests) >= MOST_GUESTS:
            oldest = next(iter(self._guests))
            if (left_s := oldest.since + PATIENCE_S - time.monotonic()) > 0:
                self._is_full = True
                self._pause(left_s)
                return
            self._drop(oldest)
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: do not spin
            self._pause(RETRY_S)
            return
        try:
            guest = Guest(self._security.accepted(connection), address[0], self._version)
        except OSError:  # it has gone
            connection.close()
            return
        self._guests[guest] = self._loop.call_later(ANSWER_S, self._drop, guest)
        self._loop.add_reader(guest.connection, self._hear, guest)

    def _hear(self, guest: Guest) -> None:
        if guest.is_new and self._is_for_store(guest):
            self._lead_to_store(guest)
            return
        try:
            said = guest.hear(self._token)
        except StrangerError:
            self._drop(guest)
            return
        if said is None:
            return
        if isinstance(said, StopGathering | Newer):  # the job runs: only that node goes
            self._drop(guest)
            return
        answer = said if isinstance(said, Refused) else self._judge(said, guest.address)
        if isinstance(answer, Refused):
            self.refused += 1
            guest.refuse(answer)
            return
        self._forget(guest)
        set_options(guest.connection, self._limit_s)
        if isinstance(answer, Spare):
            assert isinstance(said, Join)
            self._spares[guest] = said
            # the nodes of a large job are more than it takes of who has proved nothing yet
            guest.say(bytes_of(Spare(())) + bytes_of(answer))
        else:
            self._admit(guest, answer)

    def _is_for_store(self, guest: Guest) -> bool:
        """Whether it is a rank that takes this for its store, as the first bytes show."""
        try:  # of the connection itself: what speaks TLS would decrypt
            return socket.socket.recv(guest.connection, len(HELLO), socket.MSG_PEEK) == HELLO
        except OSError:
            return False

    def _lead_to_store(self, guest: Guest) -> None:
        store = self.store
        if store is None or not (port := store.port()):
            self._drop(guest)
            return
        if why := self._why_no_store(guest, store):
            if why not in self._said:
                self._said.add(why)
                store.say(why % (guest.address, self._listener.getsockname()[1]))
            self._drop(guest)
            return
        self._forget(guest)
        self._loop.remove_reader(guest.connection)
        self._relay.connect(self._loop, guest.connection, ("127.0.0.1", port))

    def _why_no_store(self, guest: Guest, store: Store) -> str:
        """Why a guest is not led there, with a place for its address and a port; empty: it is."""
        if self._security is not PLAIN:
            return NOT_BY_TLS
        own = guest.connection.getsockname()[0]
        return "" if is_of_node(guest.address, own, store.addresses()) else NO_NODE

    def _admit(self, guest: Guest, answer: NodePlace) -> None:
        self._loop.remove_reader(guest.connection)
        admitted = Admitted(answer.node_rank, guest.proof(self._token))
        guest.say(bytes_of(admitted) + bytes_of(answer.begin))
        self._admitted(answer.node_rank, guest.line())

    def _drop(self, guest: Guest) -> None:
        if guest.is_unknown:
            self.strangers += 1
        self._forget(guest)
        self._spares.pop(guest, None)
        self._loop.remove_reader(guest.connection)
        guest.close()
