"""A rank that connects to the store where the nodes met, as scripts do that name that port.

With torchrun the store is at the port of ``--master-port``; here the nodes meet there, and each
attempt has a store of its own at another port. What such a rank says goes on to that store.

A store knows neither a token nor TLS: who opens the port of the meeting alone has not opened it to
everybody. So only ranks on nodes that have joined the job are led there, and none where nodes know
each other by certificates.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

from agent.nodes.line import plain_address

HELLO = b"\x00\xce\xf7\x85\x3c"
"""What a client of torch's TCPStore says first: the kind "validate", and its magic number."""
NOT_BY_TLS = (
    "%s asks for torch's store at port %d, where nobody reaches it with --tls-config, and will ask "
    'in vain until its own time-out: let the script say init_method="env://", or no init_method'
)
NO_NODE = (
    "%s asks for torch's store at port %d, where only nodes of this job reach it: if it is one of "
    'them, by another address, let the script say init_method="env://", or no init_method'
)
_PIECE = 1 << 18  # bytes at a time


class Store(NamedTuple):
    """The store of the present attempt, and to whom it is shown."""

    port: Callable[[], int]  # on this machine; 0: it is elsewhere
    addresses: Callable[[], Collection[str]]  # of the job's nodes
    say: Callable[[str], object]  # prints one sentence for people


def is_of_node(peer: str, own: str, addresses: Collection[str]) -> bool:
    """Whether a connection comes from this machine, or from a node at one of these addresses.

    Args:
        peer: the address of the other end.
        own: that of this end.
    """
    peer = plain_address(peer)
    is_here = peer == plain_address(own) or ip_address(peer).is_loopback
    return is_here or peer in addresses


class StoreRelay:
    """Connections to the store of the present attempt, each of which ends with either side."""

    def __init__(self) -> None:
        """There is none yet."""
        self._pairs: set[_Pair] = set()

    def connect(
        self, loop: asyncio.AbstractEventLoop, client: socket.socket, address: tuple[str, int]
    ) -> None:
        """Join a client, of which nothing was read yet, with the store. Never waits.

        ``client`` is closed if there is no store.
        """
        client.setblocking(False)
        store = socket.socket()
        store.setblocking(False)
        try:
            for each in (client, store):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(BlockingIOError):
                store.connect(address)
        except OSError:
            client.close()
            store.close()
            return
        pair = _Pair(loop, client, store, self._pairs.discard)
        self._pairs.add(pair)

    def close(self) -> None:
        """Close all of them."""
        for pair in tuple(self._pairs):
            pair.close()


class _Pair:
    """Two connections, of which each says what the other one hears."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        client: socket.socket,
        store: socket.socket,
        closed: Callable[[_Pair], object],
    ) -> None:
        self._loop = loop
        self._other = {client: store, store: client}
        self._closed = closed
        self._unsent: dict[socket.socket, bytes] = {}  # what each is still to hear
        self._silent: set[socket.socket] = set()  # who says nothing any more
        loop.add_writer(store, self._begin, client, store)

    def close(self) -> None:
        """End both."""
        for end in self._other:
            self._loop.remove_reader(end)
            self._loop.remove_writer(end)
            end.close()
        self._closed(self)

    def _begin(self, client: socket.socket, store: socket.socket) -> None:
        """The store is reached, or is not there."""
        self._loop.remove_writer(store)
        if store.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.close()
            return
        for end in (client, store):
            self._loop.add_reader(end, self._hear, end)

    def _hear(self, end: socket.socket) -> None:
        """Take no more from one end before the other one has heard it."""
        other = self._other[end]
        try:
            data = end.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._loop.remove_reader(end)
        if data:
            self._unsent[other] = data
            self._say(other)
            return
        self._silent.add(end)
        if len(self._silent) == len(self._other):
            self.close()
            return
        with suppress(OSError):  # it has gone, which is heard
            other.shutdown(socket.SHUT_WR)

    def _say(self, end: socket.socket) -> None:
        data = self._unsent.pop(end)
        try:
            data = data[end.send(data) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if data:
            self._unsent[end] = data
            self._loop.add_writer(end, self._say, end)
            return
        self._loop.remove_writer(end)
        self._loop.add_reader(self._other[end], self._hear, self._other[end])
