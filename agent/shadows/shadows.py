"""The lines to the shadows of this node's ranks, and the orders that wake them.

A shadow is a process of the rank's state at an optimizer step. It belongs to the agent, not to the
rank: it outlives it, and ends when the agent closes its line or is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from agent.controller import events as ev
from agent.hooks.listener import listen, peer_of
from agent.records.journal import Journal
from agent.shadows.cut_board import Cut, CutBoard
from worker_hooks.contract import protocol, wire
from worker_hooks.contract.env import rejoined, shadows_socket
from worker_hooks.shadows.page import DuePage

GONE = "its shadow has ended"


class _Link:
    """One connection: of a shadow, of what it forked, or of a rank that refuses one."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid, self.user = peer_of(connection)
        self.made: protocol.ShadowMade | None = None

    @property
    def cut(self) -> Cut:
        assert self.made is not None
        return Cut(self.made.attempt, self.made.step)


class _Waking(NamedTuple):
    """An order that was not answered yet."""

    link: _Link
    attempt: int


class _Refusal(NamedTuple):
    """Why a cut cannot become whole."""

    cut: Cut
    why: str


class Shadows:
    """The shadows of all ranks of a job on one node."""

    def __init__(self, hooks: str, ranks: Collection[int], journal: Journal) -> None:
        """Listen.

        Args:
            hooks: the name of the agent's socket for hooks.
            journal: what is written about the run.

        Raises:
            OSError: no socket can be had.
        """
        self._ranks = frozenset(ranks)
        self._journal = journal
        self._board = CutBoard()
        self._links: dict[tuple[Cut, int], _Link] = {}
        self._others: set[_Link] = set()
        self._waking: dict[int, _Waking] = {}  # by rank
        self._told: Cut | None = None
        self._is_old = False  # the newest cut was told to have no successor yet
        self._refusal: _Refusal | None = None  # of the newest such cut: an older one may follow
        self._listener = listen(shadows_socket(hooks))
        try:
            self._page = DuePage.create()
        except OSError:
            self._listener.close()
            raise

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        answer: Callable[[protocol.Forked | protocol.ForkFailed], None],
        post: Callable[[ev.Event], None],
        attempt: Callable[[], int],
    ) -> None:
        """Listen on ``loop``.

        Args:
            answer: called once for each rank that was to be woken.
            attempt: the number of the present one.
        """
        self._loop, self._answer, self._post, self._attempt = loop, answer, post, attempt
        loop.add_reader(self._listener.fileno(), self.receive)

    @property
    def pids(self) -> frozenset[int]:
        """Processes that outlive their ranks."""
        return frozenset(link.pid for link in self._links.values())

    def wake(self, attempt: int, orders: Sequence[protocol.WorkerOrder], port: int) -> None:
        """Start an attempt from the newest cut; each rank is answered for."""
        self._refusal = None  # if what was refused still is, those that go on say so as well
        cut = self._board.newest(self._ranks)
        if cut is None:
            for order in orders:
                self._answer(protocol.ForkFailed(order.rank, attempt, GONE))
            return
        self._page.write(0)  # what was told is the dead ones'
        self._journal.event("ShadowsWoken", attempt=attempt, of_attempt=cut.attempt, step=cut.step)
        for order in orders:
            link = self._links[cut, order.rank]
            self._waking[order.rank] = _Waking(link, attempt)
            environ = order.environ | rejoined(attempt, port)
            self._send(link, protocol.WakeShadow(attempt, environ, order.stdout, order.stderr))

    def forget(self) -> None:
        """The ranks begin anew: what their shadows hold is not gone on from."""
        for cut, rank in tuple(self._links):
            self._end(cut, rank)
        self._told = self._refusal = None
        self._page.write(0)

    def cancel(self, why: str) -> None:
        """Starts that have not happened are not awaited any more."""
        waking, self._waking = self._waking, {}
        for rank, order in waking.items():
            self._answer(protocol.ForkFailed(rank, order.attempt, f"called off: {why}"))

    def close(self) -> None:
        """The job is over: closed lines tell the shadows."""
        self._waking.clear()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for link in (*self._links.values(), *self._others):
            self._drop(link)
        self._links.clear()
        self._others.clear()
        os.close(self._page.fd)

    def receive(self) -> None:
        """Take in who has connected, and what they have said."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, OSError):
                return
            link = _Link(connection)
            connection.setblocking(False)
            if link.user != os.getuid():
                connection.close()
                continue
            self._others.add(link)
            self._loop.add_reader(connection.fileno(), self._read, link)
            self._read(link)

    def _read(self, link: _Link) -> None:
        while link.connection.fileno() >= 0:
            try:
                message, fds = wire.receive(link.connection)
            except BlockingIOError:
                return
            except (OSError, wire.ProtocolError):
                message, fds = None, []
            for fd in fds:
                os.close(fd)
            if message is None:
                self._close(link)
                return
            self._hear(link, message)

    def _hear(self, link: _Link, message: protocol.Message) -> None:
        match message:
            case protocol.ShadowPageWanted(attempt=attempt):
                with contextlib.suppress(OSError):  # it is gone
                    wire.send(link.connection, protocol.ShadowPage(attempt), [self._page.fd])
            case protocol.ShadowMade() if message.rank in self._ranks and link.made is None:
                self._note(link, message)
            case protocol.ShadowRefused():
                self._journal.event("ShadowRefused", **message._asdict())
                if message.is_guarded:  # what its hooks make of it is said elsewhere
                    self._give_up()
                elif message.attempt == self._attempt():
                    cut = Cut(message.attempt, message.step)
                    self._refuse(cut, f"rank {message.rank}: {message.why}")
            case protocol.Forked() | protocol.ForkFailed():
                self._hear_of_start(link, message)
            case _:
                self._close(link)

    def _hear_of_start(self, link: _Link, message: protocol.Forked | protocol.ForkFailed) -> None:
        """A rank's process exists, and waits for a word; without it, it ends."""
        order = self._waking.get(message.rank)
        if order is None or order.attempt != message.attempt:
            self._close(link)
            return
        del self._waking[message.rank]
        if isinstance(message, protocol.Forked):
            self._send(link, protocol.WakeShadow(order.attempt, {}, "", ""))
        self._answer(message)

    def _send(self, link: _Link, message: protocol.WakeShadow) -> None:
        with contextlib.suppress(OSError):  # it is gone: its closed line says so
            wire.send(link.connection, message)

    def _note(self, link: _Link, made: protocol.ShadowMade) -> None:
        link.made = made
        self._others.discard(link)
        if (link.cut, made.rank) in self._links or made.attempt != self._attempt():
            self._drop(link)
            return
        self._links[link.cut, made.rank] = link
        self._board = self._board.with_shadow(link.cut, made.rank, made.collectives)
        if why := self._board.difference(link.cut):
            self._journal.event("ShadowsDiffer", step=made.step, why=why)
            for rank in self._ranks:
                self._end(link.cut, rank)
            self._refuse(link.cut, why)
            return
        for cut, rank in self._board.outdated(self._ranks):
            self._end(cut, rank)
        self._post_change("")

    def _give_up(self) -> None:
        """The script protects itself: what shadows there were are not gone on from."""
        was = self._told
        self.forget()
        if was is not None:
            self._post(ev.ShadowsChanged(self._attempt(), -1))

    def _refuse(self, cut: Cut, why: str) -> None:
        """There are no shadows of all ranks at a cut, nor at later ones until they are made."""
        if self._refusal is None or self._refusal.cut < cut:
            self._refusal = _Refusal(cut, why)
        self._post_change(why)

    def _post_change(self, why: str) -> None:
        """Tell the controller what all ranks can go on from now, if that is news."""
        newest = self._board.newest(self._ranks)
        if self._refusal is not None and newest is not None:
            if newest >= self._refusal.cut:
                self._refusal = None
            else:  # a rank may refuse a cut while its peers' shadows of an older one are made
                why = why or self._refusal.why
        is_held = self._refusal is not None or (bool(why) and newest == self._told)
        is_old = newest is not None and is_held
        if newest != self._told or (why and newest is None) or (is_old and not self._is_old):
            every = self._steps_between(self._told, newest)
            self._told, self._is_old = newest, is_old
            step = -1 if newest is None else newest.step
            said = why if newest is None or is_old else ""
            self._post(ev.ShadowsChanged(self._attempt(), step, said, every))

    @staticmethod
    def _steps_between(before: Cut | None, newest: Cut | None) -> int:
        """The present interval in optimizer steps; 0: not known."""
        if before is None or newest is None or before.attempt != newest.attempt:
            return 0
        return newest.step - before.step

    def _end(self, cut: Cut, rank: int) -> None:
        link = self._links.pop((cut, rank), None)
        if link is not None:
            self._board = self._board.without(cut, rank)
            self._drop(link)

    def _close(self, link: _Link) -> None:
        """A line is closed by its other end, or what it said is not understood."""
        self._others.discard(link)
        if link.made is not None and self._links.get((link.cut, link.made.rank)) is link:
            self._end(link.cut, link.made.rank)
            self._post_change(f"the shadow of rank {link.made.rank} has ended")
            order = self._waking.get(link.made.rank)
            if order is not None and order.link is link:
                del self._waking[link.made.rank]
                self._answer(protocol.ForkFailed(link.made.rank, order.attempt, GONE))
        self._drop(link)

    def _drop(self, link: _Link) -> None:
        if link.connection.fileno() >= 0:
            self._loop.remove_reader(link.connection.fileno())
            link.connection.close()
