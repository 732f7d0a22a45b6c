"""The agent's ends of the links to training scripts: who speaks, and that it is well formed.

One link per rank of the present attempt; a survivor keeps its link from attempt to attempt. What a
message means is the business of ``agent.supervisor.hooks_bridge``; this module closes a link that
is not ours, comes twice or sends nonsense, and it never waits.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterable, Sequence

from agent.hooks.listener import peer_of
from agent.records.journal import Journal
from worker_hooks.contract import protocol, wire

BURST = 32  # messages taken from one link before others have their turn
RETRY_S = 1.0  # after descriptors ran out
Loop = asyncio.AbstractEventLoop
Timer = asyncio.TimerHandle


Relay = Callable[[Sequence[int], protocol.Message], None]
"""Sends a message to ranks of other nodes."""

# fmt: off
Said = (
    protocol.Hello | protocol.Registered | protocol.PageWritten | protocol.Fingerprinted
    | protocol.Unprotected | protocol.Raised | protocol.Leaving | protocol.ExitRequested
    | protocol.Standing | protocol.Frozen | protocol.Written | protocol.Digested
    | protocol.SaveFailed | protocol.Progress | protocol.Rejoining | protocol.Stack
    | protocol.VoteOpened | protocol.NotesMeasured | protocol.Copied | protocol.BringMemory
    | protocol.CheckpointCompleted
)
# fmt: on
"""What a training script may say; each names its rank and attempt."""


class _Link:
    """One connection; ``rank`` is -1 before its Hello."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid, self.uid = peer_of(connection)
        self.rank = -1


class RankLinks:
    """The links to the ranks of the present attempt."""

    def __init__(self, listener: socket.socket, ranks: Iterable[int], journal: Journal) -> None:
        """``listener`` does not block; it stays the caller's."""
        self._listener = listener
        self._ranks = frozenset(ranks)
        self._journal = journal
        self._attempt: int | None = None  # between attempts no rank is heard
        self._unknown: set[_Link] = set()  # no Hello yet
        self._links: dict[int, _Link] = {}
        self._expected: dict[int, int] = {}  # rank -> an attempt that has not begun
        self._early: dict[_Link, protocol.Hello] = {}  # of those ranks, until it has
        self._retry: asyncio.TimerHandle | None = None
        self._strangers: dict[int, int] = {}  # another user's id -> how often it has connected
        self._relay: Relay | None = None
        self._elsewhere: set[int] = set()  # ranks of other nodes that have a link there

    def attach(
        self,
        loop: Loop,
        heard: Callable[[Said, list[int]], None],
        lost: Callable[[int, int], None],
    ) -> None:
        """Listen on ``loop``.

        Args:
            heard: takes a message and the descriptors beside it; takes out those that it keeps.
            lost: takes the rank and the process of a link that the other end closed, or that had
                to be closed.
        """
        self._loop = loop
        self._heard = heard
        self._lost = lost
        self._watch()

    def relay_others(self, send: Relay) -> None:
        """Ranks of other nodes are sent to by ``send``; see :meth:`hear_relayed`."""
        self._relay = send

    def begin(self, attempt: int) -> None:
        """Hear the ranks of this attempt, and only them."""
        self.end()
        self._attempt = attempt

    def expect(self, attempt: int, ranks: Iterable[int]) -> None:
        """Newcomers of an attempt that may begin may say Hello already; they are heard then."""
        for link in tuple(self._early):
            self._close(link)
        self._expected = dict.fromkeys(ranks, attempt)

    def admit(self) -> None:
        """The attempt has begun: answer the Hellos of its newcomers."""
        early, self._early, self._expected = self._early, {}, {}
        for link, hello in early.items():
            if why := self._accept(link, hello):
                self._drop(link, why)
            else:
                self._hear(link, hello, [])

    def renew(self, attempt: int, survivors: Iterable[int]) -> None:
        """Keep the links of survivors in a new attempt, and close those of others."""
        self._attempt, kept = attempt, frozenset(survivors)
        self._elsewhere &= kept
        for rank, link in tuple(self._links.items()):
            if rank not in kept:
                self._close(link)

    def end(self) -> None:
        """Close every link."""
        self._attempt, self._expected = None, {}
        self._elsewhere.clear()
        for link in (*self._unknown, *self._links.values()):
            self._close(link)

    def close(self) -> None:
        """Close every link and stop listening."""
        self.end()
        for user, count in self._strangers.items():
            if count > 1:
                why = f"{count} connections were user {user}'s"
                self._journal.event("LinkRefused", pid=0, why=why)
        self._strangers.clear()
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener.fileno())

    def unlink(self, rank: int) -> None:
        """A rank of another node has no link any more."""
        self._elsewhere.discard(rank)

    def has(self, rank: int) -> bool:
        """Whether a rank has a link, here or on its node."""
        return rank in self._links or rank in self._elsewhere

    def pid(self, rank: int) -> int:
        """The process at a rank's link; 0: there is none."""
        link = self._links.get(rank)
        return 0 if link is None else link.pid

    def send(self, rank: int, message: protocol.Message, fds: Sequence[int] = ()) -> bool:
        """Send a message to a rank. One that reads nothing any more is dropped.

        One that is dead is dropped once all has been heard that it had said.

        Returns:
            Whether it need not be sent again: ``False`` if too many descriptors are on their way.
        """
        link = self._links.get(rank)
        if link is None:
            if self._relay is not None and rank not in self._ranks:
                self._relay((rank,), message)
            return True
        try:
            wire.send(link.connection, message, fds)
        except ConnectionError:
            return True  # the end of its messages shows its death, and follows in the loop
        except OSError as error:  # it has read nothing for a hundred messages
            if error.errno == errno.ETOOMANYREFS:  # of this user, as many as it may have open
                return False
            self._drop(link, f"cannot be sent {type(message).__name__}: {error.strerror}")
        return True

    def send_all(self, ranks: Iterable[int], message: protocol.Message) -> None:
        """Send the same to several ranks; to those of other nodes by one call."""
        elsewhere: list[int] = []
        for rank in ranks:
            if self._relay is not None and rank not in self._ranks:
                elsewhere.append(rank)
            else:
                self.send(rank, message)
        if elsewhere and self._relay is not None:
            self._relay(elsewhere, message)

    # --- who connects ----------------------------------------------------------------------------

    def _watch(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener.fileno(), self._on_connection)

    def _on_connection(self) -> None:
        for _ in range(BURST):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor, no memory: the socket would stay readable
                self._journal.event("LinkRefused", why=str(error.strerror))
                self._loop.remove_reader(self._listener.fileno())
                self._retry = self._loop.call_later(RETRY_S, self._watch)
                return
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        link = _Link(connection)
        if link.uid != os.geteuid():
            connection.close()
            self._count_stranger(link)
            return
        self._unknown.add(link)
        self._loop.add_reader(connection.fileno(), self._on_readable, link)

    def _count_stranger(self, link: _Link) -> None:
        """Log the first connection of a user, then the tenth, the hundredth: logs must not fill."""
        count = self._strangers[link.uid] = self._strangers.get(link.uid, 0) + 1
        if str(count).strip("0") == "1":
            times = "" if count == 1 else f", for the {count}th time"
            self._journal.event("LinkRefused", pid=link.pid, why=f"it is user {link.uid}'s{times}")

    def _accept(self, link: _Link, message: protocol.Message | None) -> str:
        """Why this link is refused; empty: it is the rank's now."""
        if not isinstance(message, protocol.Hello):
            return "no Hello" if message is None else f"{type(message).__name__} before Hello"
        if message.rank not in self._ranks:
            return f"rank {message.rank} is not of this node"
        if message.attempt != self._attempt:
            return f"rank {message.rank} is of attempt {message.attempt}"
        if message.rank in self._links:  # a child that imports the script, too
            return f"rank {message.rank} has a link already"
        self._unknown.discard(link)
        link.rank = message.rank
        self._links[message.rank] = link
        return ""

    def _is_early(self, link: _Link, message: protocol.Message | None) -> bool:
        if link.rank >= 0 or link in self._early or not isinstance(message, protocol.Hello):
            return False
        if message.rank in {hello.rank for hello in self._early.values()}:
            return False
        return message.attempt == self._expected.get(message.rank)

    # --- what it says ---------------------------------------------------------------------------

    def _on_readable(self, link: _Link) -> bool:
        """Take in a burst of messages; whether more may wait."""
        for _ in range(BURST):
            if link.connection.fileno() < 0:
                return False  # closed meanwhile
            try:
                message, fds = wire.receive(link.connection)
            except BlockingIOError:
                return False
            except (wire.ProtocolError, OSError) as error:
                self._drop(link, str(error))
                return False
            try:
                if not self._take_in(link, message, fds):
                    return False
            finally:
                for fd in fds:  # that nobody has taken out
                    os.close(fd)
        return True

    def _take_in(self, link: _Link, message: protocol.Message | None, fds: list[int]) -> bool:
        """Take in one message, or the end of them; whether more may follow."""
        if self._is_early(link, message):
            assert isinstance(message, protocol.Hello)
            self._early[link] = message
            return False
        if link.rank < 0 and (why := self._accept(link, message)):
            self._drop(link, why)
            return False
        if message is None:
            self._drop(link, "")
            return False
        self._hear(link, message, fds)
        return True

    def _hear(self, link: _Link, message: protocol.Message, fds: list[int]) -> None:
        present = self._attempt
        if isinstance(message, Said) and present is not None and message.rank == link.rank:
            if message.attempt == present:
                self._heard(message, fds)
                return
            if message.attempt < present:  # sent before it knew that it is in a new attempt
                if isinstance(message, protocol.ExitRequested):  # which is of no attempt
                    self._heard(message._replace(attempt=present), [])
                return
        self._drop(link, f"not what rank {link.rank} may say: {message}"[:300])

    def hear_relayed(self, message: Said) -> None:
        """Take in what a rank of another node has said there, if it is of this attempt."""
        present = self._attempt
        if isinstance(message, protocol.Hello):
            self._elsewhere.add(message.rank)
        if present is not None and isinstance(message, protocol.ExitRequested):
            message = message._replace(attempt=present)  # which is of no attempt
        if message.attempt == present:
            self._heard(message, [])

    def _drop(self, link: _Link, why: str) -> None:
        if why:
            self._journal.event("LinkRefused", rank=link.rank, pid=link.pid, why=why)
        self._close(link)
        if link.rank >= 0:
            self._lost(link.rank, link.pid)

    def hear_out(self, rank: int) -> None:
        """Take in the last messages of a dead rank, then close its link."""
        link = self._links.get(rank)
        if link is not None:
            while self._on_readable(link):
                pass
            self._close(link)

    def catch_up(self, ranks: Iterable[int]) -> None:
        """Take in what living ranks have sent by now."""
        for rank in ranks:
            if (link := self._links.get(rank)) is not None:
                self._on_readable(link)

    def drop(self, rank: int, why: str) -> None:
        """Close a rank's link for what it said."""
        if (link := self._links.get(rank)) is not None:
            self._drop(link, why)

    def _close(self, link: _Link) -> None:
        self._unknown.discard(link)
        self._early.pop(link, None)
        if self._links.get(link.rank) is link:
            del self._links[link.rank]
        if link.connection.fileno() >= 0:
            self._loop.remove_reader(link.connection.fileno())
            link.connection.close()
