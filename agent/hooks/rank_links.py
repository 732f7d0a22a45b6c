"""The agent's ends of the lines to training scripts: who speaks, and that it is well formed.

One line per rank of the present attempt, into which it may have lived on from an earlier one. What
a message means is ``agent.supervisor.hooks_bridge``'s business; here a line that is not ours,
comes twice or talks nonsense is closed, and nothing ever waits.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterable

from agent.records.journal import Journal
from worker_hooks.contract import protocol, wire

BURST = 32  # messages taken from one line before others have their turn
RETRY_S = 1.0  # after descriptors ran out
Loop = asyncio.AbstractEventLoop
Timer = asyncio.TimerHandle

_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid

Said = (
    protocol.Hello
    | protocol.Registered
    | protocol.Raised
    | protocol.Leaving
    | protocol.ExitRequested
    | protocol.Standing
    | protocol.Frozen
    | protocol.Written
    | protocol.Digested
    | protocol.SaveFailed
    | protocol.Progress
    | protocol.Rejoining
    | protocol.Stack
)
"""What a training script may say; each names its rank and attempt."""


class _Line:
    """One connection; ``rank`` is -1 before its Hello."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.pid, self.uid, _ = _PEER.unpack(
            link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        )
        self.rank = -1


class RankLinks:
    """Every line of the present attempt."""

    def __init__(self, door: socket.socket, ranks: Iterable[int], journal: Journal) -> None:
        """``door`` listens and does not block; it stays the caller's."""
        self._door = door
        self._ranks = frozenset(ranks)
        self._journal = journal
        self._attempt: int | None = None  # between attempts nobody is heard
        self._strangers: set[_Line] = set()  # no Hello yet
        self._lines: dict[int, _Line] = {}
        self._expected: dict[int, int] = {}  # rank -> an attempt that has not begun
        self._early: dict[_Line, protocol.Hello] = {}  # of those, until it has
        self._retry: asyncio.TimerHandle | None = None

    def attach(
        self,
        loop: Loop,
        heard: Callable[[Said, list[int]], None],
        lost: Callable[[int, int], None],
    ) -> None:
        """Listen on ``loop``.

        Args:
            loop: the agent's.
            heard: takes a message and the descriptors beside it, which are its own then.
            lost: takes the rank and the process of a line that was closed from the other end or
                had to be closed.
        """
        self._loop = loop
        self._heard = heard
        self._lost = lost
        self._watch_door()

    def begin(self, attempt: int) -> None:
        """Hear the ranks of this attempt, and only them."""
        self.end()
        self._attempt = attempt

    def expect(self, attempt: int, ranks: Iterable[int]) -> None:
        """Newcomers of an attempt that may begin may greet already; they are heard then."""
        for line in tuple(self._early):
            self._close(line)
        self._expected = dict.fromkeys(ranks, attempt)

    def admit(self) -> None:
        """The attempt has begun, and its newcomers' greetings can be answered."""
        early, self._early, self._expected = self._early, {}, {}
        for line, hello in early.items():
            if why := self._greet(line, hello):
                self._drop(line, why)
            else:
                self._hear(line, hello, [])

    def renew(self, attempt: int, survivors: Iterable[int]) -> None:
        """Go on with the lines of survivors in a new attempt; those of others are closed."""
        self._attempt, kept = attempt, frozenset(survivors)
        for rank, line in tuple(self._lines.items()):
            if rank not in kept:
                self._close(line)

    def end(self) -> None:
        """Close every line."""
        self._attempt, self._expected = None, {}
        for line in (*self._strangers, *self._lines.values()):
            self._close(line)

    def close(self) -> None:
        """Close every line and stop listening."""
        self.end()
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._door.fileno())

    def pid(self, rank: int) -> int:
        """The process at a rank's line; 0: there is none."""
        line = self._lines.get(rank)
        return 0 if line is None else line.pid

    def send(self, rank: int, message: protocol.Message) -> None:
        """Say something to a rank. One that does not listen any more is lost."""
        line = self._lines.get(rank)
        if line is None:
            return
        try:
            wire.send(line.link, message)
        except OSError as error:  # gone, or it has read nothing for a hundred messages
            self._drop(line, f"cannot be told {type(message).__name__}: {error.strerror}")

    # --- who knocks -----------------------------------------------------------------------------

    def _watch_door(self) -> None:
        self._retry = None
        self._loop.add_reader(self._door.fileno(), self._on_knock)

    def _on_knock(self) -> None:
        for _ in range(BURST):
            try:
                link, _ = self._door.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor, no memory: the door would stay readable
                self._journal.event("LinkRefused", why=str(error.strerror))
                self._loop.remove_reader(self._door.fileno())
                self._retry = self._loop.call_later(RETRY_S, self._watch_door)
                return
            self._take(link)

    def _take(self, link: socket.socket) -> None:
        link.setblocking(False)
        line = _Line(link)
        if line.uid != os.geteuid():
            self._journal.event("LinkRefused", pid=line.pid, why=f"it is user {line.uid}'s")
            link.close()
            return
        self._strangers.add(line)
        self._loop.add_reader(link.fileno(), self._on_readable, line)

    def _greet(self, line: _Line, message: protocol.Message | None) -> str:
        """Why this line is refused; empty: it is the rank's now."""
        if not isinstance(message, protocol.Hello):
            return "no greeting" if message is None else f"{type(message).__name__} before Hello"
        if message.rank not in self._ranks:
            return f"rank {message.rank} is not of this node"
        if message.attempt != self._attempt:
            return f"rank {message.rank} is of attempt {message.attempt}"
        if message.rank in self._lines:  # a child that imports the script, too
            return f"rank {message.rank} has a line already"
        self._strangers.discard(line)
        line.rank = message.rank
        self._lines[message.rank] = line
        return ""

    def _is_early(self, line: _Line, message: protocol.Message | None) -> bool:
        if line.rank >= 0 or line in self._early or not isinstance(message, protocol.Hello):
            return False
        if message.rank in {hello.rank for hello in self._early.values()}:
            return False
        return message.attempt == self._expected.get(message.rank)

    # --- what it says ---------------------------------------------------------------------------

    def _on_readable(self, line: _Line) -> None:
        for _ in range(BURST):
            if line.link.fileno() < 0:
                return  # closed meanwhile
            try:
                message, fds = wire.receive(line.link)
            except BlockingIOError:
                return
            except (wire.ProtocolError, OSError) as error:
                self._drop(line, str(error))
                return
            if self._is_early(line, message):
                assert isinstance(message, protocol.Hello)
                _close_all(fds)
                self._early[line] = message
                return
            if line.rank < 0 and (why := self._greet(line, message)):
                _close_all(fds)
                self._drop(line, why)
                return
            if message is None:
                _close_all(fds)  # beside a packet without a byte
                self._drop(line, "")
                return
            self._hear(line, message, fds)

    def _hear(self, line: _Line, message: protocol.Message, fds: list[int]) -> None:
        present = self._attempt
        if isinstance(message, Said) and present is not None and message.rank == line.rank:
            if message.attempt == present:
                self._heard(message, fds)
                return
            if message.attempt < present:  # said before it heard that it is in a new attempt
                _close_all(fds)
                if isinstance(message, protocol.ExitRequested):  # which is of no attempt
                    self._heard(message._replace(attempt=present), [])
                return
        _close_all(fds)
        self._drop(line, f"not what rank {line.rank} may say: {message}"[:300])

    def _drop(self, line: _Line, why: str) -> None:
        if why:
            self._journal.event("LinkRefused", rank=line.rank, pid=line.pid, why=why)
        self._close(line)
        if line.rank >= 0:
            self._lost(line.rank, line.pid)

    def hear_out(self, rank: int) -> None:
        """Take in what a dead rank said last; its line is closed then."""
        line = self._lines.get(rank)
        if line is not None:
            self._on_readable(line)
            self._close(line)

    def catch_up(self, ranks: Iterable[int]) -> None:
        """Take in what living ranks have said by now."""
        for rank in ranks:
            if (line := self._lines.get(rank)) is not None:
                self._on_readable(line)

    def drop(self, rank: int, why: str) -> None:
        """Close a rank's line for what it said."""
        if (line := self._lines.get(rank)) is not None:
            self._drop(line, why)

    def _close(self, line: _Line) -> None:
        self._strangers.discard(line)
        self._early.pop(line, None)
        if self._lines.get(line.rank) is line:
            del self._lines[line.rank]
        if line.link.fileno() >= 0:
            self._loop.remove_reader(line.link.fileno())
            line.link.close()


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
