"""Whether the other nodes' msruns are there: who connects to one that has ended is refused."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from agent.nodes.line import LIMIT_S
from agent.nodes.roster import Doors

AGAIN_S = 1.0  # from one knock at a door to the next
UNSEEN_S = 5.0  # between two looks: then its silence counts anew
_PENDING = {errno.EINPROGRESS, errno.EWOULDBLOCK}


class Address(NamedTuple):
    """Where a node would be found."""

    host: str  # a name is looked up each time: it may have got another address
    port: int


class _Knock:
    """One door; the connection serves for nothing but to see whether somebody listens."""

    def __init__(self, address: Address, *, is_silent: bool) -> None:
        self._address = address
        self._connection: socket.socket | None = None
        self._next_s = 0.0
        self._unheard_since_s = -LIMIT_S if is_silent else time.monotonic()
        self._looked_s = time.monotonic()
        self.is_open: bool | None = None  # None: not known
        self.is_silent = False

    def look(self) -> None:
        """Take in what came of it, and knock again when it is time. Never waits."""
        now = time.monotonic()
        if now - self._looked_s > UNSEEN_S:  # nobody listened to what it would have said
            self.close()
            self._unheard_since_s, self.is_silent = now, False
        self._looked_s = now
        if self._connection is not None and self._is_over():
            self.close()
            self._next_s = now + AGAIN_S
        if self._connection is None and now >= self._next_s:
            self._dial()
        if now - self._unheard_since_s > LIMIT_S:
            self.is_open, self.is_silent = None, True

    def close(self) -> None:
        """Nobody wants to know any more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _dial(self) -> None:
        self._next_s = time.monotonic() + AGAIN_S
        try:
            found = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
        except OSError:
            return  # as good as silence
        family, kind, protocol, _, address = found[0]
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        code = connection.connect_ex(address)
        if code in _PENDING:
            self._connection = connection
        else:
            self._heard(code, connection)
            connection.close()

    def _is_over(self) -> bool:
        assert self._connection is not None
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        if not poll.poll(0):
            return False
        self._heard(
            self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), self._connection
        )
        return True

    def _heard(self, code: int, connection: socket.socket) -> None:
        if code == 0:  # a port that is dialled by itself is nobody's
            self.is_open = connection.getsockname() != connection.getpeername()
        elif code in {errno.ECONNREFUSED, errno.ECONNRESET}:
            self.is_open = False
        else:  # no way to it, says a machine between
            return
        self.is_silent, self._unheard_since_s = False, time.monotonic()


class DoorWatch:
    """Knocks at doors now and then."""

    def __init__(
        self, addresses: Mapping[int, Address], silent: frozenset[int] = frozenset()
    ) -> None:
        """Begin.

        Args:
            addresses: by the nodes' ranks.
            silent: of these nothing has been heard for a while.
        """
        self._knocks = {
            rank: _Knock(address, is_silent=rank in silent) for rank, address in addresses.items()
        }

    def look(self, ranks: set[int]) -> Doors:
        """What is known of the msruns of these nodes; the others are let alone. Never waits."""
        for rank, knock in self._knocks.items():
            if rank in ranks:
                knock.look()
            else:
                knock.close()
        found = {rank: self._knocks[rank] for rank in ranks if rank in self._knocks}
        return Doors(
            gone=frozenset(rank for rank, each in found.items() if each.is_open is False),
            silent=frozenset(rank for rank, each in found.items() if each.is_silent),
            open=frozenset(rank for rank, each in found.items() if each.is_open),
        )

    def close(self) -> None:
        """Close what is open."""
        for knock in self._knocks.values():
            knock.close()
