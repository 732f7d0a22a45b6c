"""Whether the other nodes' msruns are there: who connects to one that has ended is refused."""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agent.nodes.line import LIMIT_S
from agent.nodes.roster import Doors

AGAIN_S = 1.0  # from one knock at a door to the next
UNSEEN_S = 5.0  # between two looks: then its silence counts anew
DIAL_S = 3.0  # for a connection to come about
LOOKUP_S = 0.02  # that a look waits for a resolver
_PENDING = {errno.EINPROGRESS, errno.EWOULDBLOCK}
_REFUSALS = {errno.ECONNREFUSED, errno.ECONNRESET}
_NO_WAY = {errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}  # from this machine

_Found = tuple[int, int, int, str, Any]  # as from getaddrinfo


class Address(NamedTuple):
    """Where a node would be found."""

    host: str  # a name is looked up each time: it may have got another address
    port: int


class _Knock:
    """One door; the connection serves for nothing but to see whether somebody listens."""

    def __init__(self, address: Address, limit_s: float, *, is_silent: bool) -> None:
        self._limit_s = limit_s
        self._lookup = _Lookup(address)
        self._connection: socket.socket | None = None
        self._since_s = 0.0  # of the connection
        self._left: list[_Found] = []  # addresses of the name that are still to be tried
        self._is_refused = False  # by one of them
        self._is_sure = True  # the others said the same, or there is no way from here
        self._next_s = 0.0
        self._unheard_since_s = -limit_s if is_silent else time.monotonic()
        self._looked_s = time.monotonic()
        self.is_open: bool | None = None  # None: not known
        self.is_silent = False

    def look(self) -> None:
        """Take in what came of it, and knock again when it is time. Hardly ever waits."""
        now = time.monotonic()
        if now - self._looked_s > UNSEEN_S:  # nobody listened to what it would have said
            self.close()
            self._unheard_since_s, self.is_silent, self.is_open = now, False, None
        self._looked_s = now
        if self._connection is not None:
            self._look_at(self._connection, now)
        if self._connection is None and now >= self._next_s:
            self._begin(now)
        if now - self._unheard_since_s > self._limit_s:
            self.is_open, self.is_silent = None, True

    def close(self) -> None:
        """Nobody wants to know any more."""
        self._left.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _begin(self, now: float) -> None:
        """Try one address, the first of all if it is time."""
        if not self._left:
            found = self._lookup.found()
            if found is None:
                return  # it is being looked up
            self._left, self._is_refused, self._is_sure = [*found], False, True
        self._next_s = now + AGAIN_S
        while self._left and self._connection is None:
            family, kind, protocol, _, address = self._left.pop(0)
            try:
                connection = socket.socket(family, kind, protocol)
            except OSError as error:  # no descriptor is left, or no such family here
                self._is_sure &= error.errno in _NO_WAY
                continue
            connection.setblocking(False)
            code = connection.connect_ex(address)
            if code in _PENDING:
                self._connection, self._since_s = connection, now
                return
            self._hear(code, connection)
            connection.close()

    def _look_at(self, connection: socket.socket, now: float) -> None:
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        if poll.poll(0):
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        elif now < self._since_s + DIAL_S:
            return
        else:  # the kernel asks again ever later: a new connection is there sooner
            code = errno.ETIMEDOUT
        self._connection = None
        self._hear(code, connection)
        connection.close()
        if self._left:
            self._begin(now)
        else:
            self._next_s = now + AGAIN_S

    def _hear(self, code: int, connection: socket.socket) -> None:
        is_own = code == 0 and connection.getsockname() == connection.getpeername()
        if code == 0 and not is_own:  # a port that is dialled by itself is nobody's
            self._left.clear()
            self._know(is_open=True)
            return
        self._is_refused |= is_own or code in _REFUSALS
        self._is_sure &= is_own or code in _REFUSALS | _NO_WAY
        if not self._left and self._is_refused and self._is_sure:
            self._know(is_open=False)

    def _know(self, *, is_open: bool) -> None:
        self.is_open, self.is_silent = is_open, False
        self._unheard_since_s = time.monotonic()


class _Lookup:
    """What addresses a name has at present; a resolver may take long to say so."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._thread: threading.Thread | None = None
        self._found: Sequence[_Found] = []

    def found(self) -> Sequence[_Found] | None:
        """Its addresses, none if it has none; ``None``: ask again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._find, daemon=True)
            self._thread.start()
        self._thread.join(LOOKUP_S)
        if self._thread.is_alive():
            return None
        self._thread = None
        return self._found

    def _find(self) -> None:
        try:
            self._found = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
        except (OSError, ValueError):  # as good as silence
            self._found = []


class DoorWatch:
    """Knocks at doors now and then."""

    def __init__(
        self,
        addresses: Mapping[int, Address],
        silent: frozenset[int] = frozenset(),
        limit_s: float = LIMIT_S,
    ) -> None:
        """Begin.

        Args:
            addresses: of the nodes, by their places.
            silent: of these nothing has been heard for a while.
            limit_s: after which one counts as silent.
        """
        self._knocks = {
            rank: _Knock(address, limit_s, is_silent=rank in silent)
            for rank, address in addresses.items()
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
