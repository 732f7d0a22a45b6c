"""A line to another node while the job runs, on the loop of msrun: what is said, and its loss."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from agent.nodes.alike import ANYTIME, Merger, Once
from agent.nodes.frames import FrameError, FrameReader
from agent.nodes.line import (
    CLOSED,
    LATE_S,
    RECEIVE_BYTES,
    SILENT,
    Line,
    Loss,
    LossKind,
    Pulse,
    bytes_of,
    loss_of,
    message_in,
)
from agent.nodes.messages import NodeMessage
from agent.nodes.vocabulary import CodecError

MOST_UNSENT = 64 << 20  # bytes: an end that takes so much less than it is told is as good as silent
MOST_READS = 64  # at once: more than the kernel keeps, of an end that does not stop talking
_SEND_BYTES = 1 << 20  # at a time
_LEAST_S = 0.002  # between two looks at a silent end: what the kernel tells is that coarse
_AT_ONCE = struct.pack("ii", 1, 0)  # linger: what is unsent is dropped, and the other end is told

_encoded = Once(bytes_of)

Heard = Callable[[NodeMessage], None]
Lost = Callable[[Loss], None]


class NodeLink:
    """Sends and hears messages. It never waits, but in :meth:`drain`."""

    def __init__(self, line: Line, ranks: Sequence[int] = ()) -> None:
        """Take the connection over; ``ranks``: of this node, if it is not the controller's."""
        self._ranks = ranks
        self.open(line)

    @classmethod
    def lost(cls) -> NodeLink:
        """A link to a node that is lost before anything was said."""
        end, other = socket.socketpair()
        other.close()
        link = cls(Line(end))
        link.close()
        return link

    def open(self, line: Line) -> None:
        """Take another connection over, in the place of one that is lost; see :meth:`attach`."""
        line.connection.setblocking(False)
        self._connection = line.connection
        self._pulse = Pulse(line.connection)
        self._limit_s = self._pulse.limit_s()
        self._silence: asyncio.Handle | None = None  # until the limit may be reached
        self._reader = FrameReader(message_in)
        self._early = line.heard
        self._unsent = bytearray(line.unsent)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: _Turn | None = None  # of that loop
        self._is_open = True
        self._failure: Loss | None = None  # of sending; the kernel tells an error only once
        self._is_writing = False  # the loop says when the kernel takes more
        self._merger = Merger(self._ranks)
        self._is_due = False  # what was said in this turn of the loop is sent at its end
        self._heard_s, self._looked_s = time.monotonic(), 0.0  # its msrun; when that was asked for
        self.doubted_s = 0.0
        """When it was last asked whether the line is in doubt, monotonic: updates wait then."""

    @property
    def is_open(self) -> bool:
        """Whether the line was neither lost nor closed."""
        return self._is_open

    def is_in_doubt(self) -> bool:
        """Whether what was said before the last look is unanswered; a lost line is in doubt."""
        self.doubted_s = time.monotonic()
        return not self._is_open or self._pulse.is_missed()

    def unheard_s(self) -> float:
        """How long the other machine has not answered; 0 of a lost line.

        The kernel is not asked where something was read since the last call.
        """
        has_spoken, self._looked_s = self._heard_s > self._looked_s, time.monotonic()
        return 0.0 if has_spoken or not self._is_open else self._pulse.unheard_s()

    @property
    def limit_s(self) -> float:
        """After how long a silent end counts as lost; 0: the kernel does not say."""
        return self._limit_s

    def mute_s(self) -> float:
        """How long its msrun has said nothing, whatever its kernel answers; 0 of a lost line."""
        return time.monotonic() - self._heard_s if self._is_open else 0.0

    def give_up(self, loss: Loss) -> None:
        """Lose the line for a reason that it does not know of."""
        self._lose(loss)

    def attach(self, loop: asyncio.AbstractEventLoop, heard: Heard, lost: Lost) -> None:
        """Hear and send on ``loop``.

        Args:
            loop: msrun's.
            heard: takes each message.
            lost: takes why the line ended, once, after its last message; not after :meth:`close`.
        """
        self._loop, self._heard, self._lost = loop, heard, lost
        self._turn = _turn_of(loop)
        loop.add_reader(self._connection, self._read)
        loop.call_soon(self._take_early)  # not before the caller is ready for it
        if self._limit_s:
            self._silence = loop.call_soon(self._await_silence)
        self._write()

    def send(self, message: NodeMessage) -> None:
        """Say something. To a lost line it is lost.

        Raises:
            FrameError: the message is too large to travel.
        """
        if self._turn is not None:
            if not self._is_due:
                self._is_due = True
                self._turn.add(self)
            if self._merger.add(message):
                return
        if self._merger and not isinstance(message, ANYTIME):
            self._take_merged()
        self._add(message)

    def end_turn(self) -> None:
        """One call of the kernel for all that was said: with thousands of nodes it counts."""
        self._is_due = False
        if self._merger:
            self._take_merged()
        if self._is_open and not self._is_writing:
            self._write()

    def _take_merged(self) -> None:
        for message in self._merger.take():
            self._add(message)

    def _add(self, message: NodeMessage) -> None:
        data = _encoded(message)
        if not self._is_open:
            return
        self._unsent += data
        if len(self._unsent) > MOST_UNSENT:
            why = f"takes too little of what it is told ({len(self._unsent)} bytes wait)"
            self._lose_soon(Loss(LossKind.SILENCE, why))

    def drain(self, timeout_s: float) -> bool:
        """Send what is left, wait until the other end has closed, and close: the job is over.

        It blocks, and what still comes is not heard: closing with unread data could take back what
        was sent.

        Returns:
            Whether everything was sent.
        """
        if not self._is_open:
            return False
        self._take_merged()
        self._detach()
        end = time.monotonic() + timeout_s
        is_sent = False
        try:
            if is_sent := self._flushed(end):
                self._connection.shutdown(socket.SHUT_WR)
                while self._is_ready(select.POLLIN, end) and self._connection.recv(RECEIVE_BYTES):
                    pass
        except OSError:  # it has gone
            pass
        self.close()
        return is_sent

    def close(self) -> None:
        """Close the line; of what was said this turn goes what the kernel takes at once."""
        if self._is_open:
            if self._is_due:
                self.end_turn()
            self._detach()
            self._is_open = False
            self._connection.close()

    def _await_silence(self) -> None:
        """Lose the line if the kernel has not yet, though nothing was heard for so long."""
        if self._loop is None:
            return
        left_s = self._limit_s + LATE_S - self._pulse.unheard_s()
        if left_s > 0:
            self._silence = self._loop.call_later(max(left_s, _LEAST_S), self._await_silence)
            return
        with suppress(OSError):  # what was said may not arrive behind that, as the other end is
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)  # given up
        self._lose(self._timed(SILENT))

    def _loss_of(self, error: OSError) -> Loss:
        return self._timed(loss_of(error))

    def _timed(self, loss: Loss) -> Loss:
        """With how long nothing was heard, where that is why, and the kernel can tell."""
        unheard_s = self._pulse.unheard_s()
        if loss.kind is LossKind.PROOF or not (self._limit_s and unheard_s):
            return loss
        return loss._replace(over_s=unheard_s - self._limit_s)

    def _detach(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        if self._loop is not None:
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._loop = self._turn = None

    def catch_up(self) -> None:
        """Hear what lies unread: somebody is about to be judged for not having said it."""
        if self._early:  # what lies there came after it
            return
        for _ in range(MOST_READS):
            if not self._read():
                return

    def _take_early(self) -> None:
        early, self._early = self._early, b""
        self._take(early)

    def _read(self) -> bool:
        """Take what is there, but let others have their turn; whether there was anything."""
        if self._loop is None:
            return False
        try:
            data = self._connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(self._loss_of(error))
            return False
        if data:
            self._heard_s = time.monotonic()
            self._take(data)
        else:
            self._lose(self._failure or CLOSED)
        return bool(data)

    def _take(self, data: bytes) -> None:
        """Hand on the messages that are complete with ``data``, while somebody listens."""
        self._reader.add(data)
        while self._loop is not None:
            try:
                message = self._reader.take()
            except (FrameError, CodecError) as error:
                # it may well be alive, so this proves no death
                self._lose(Loss(LossKind.SILENCE, f"said what nobody understands: {error!s:.200}"))
                return
            if message is None:
                return
            self._heard(message)

    def _write(self) -> None:
        while self._unsent:
            try:
                sent = self._connection.send(bytes(self._unsent[:_SEND_BYTES]))
            except BlockingIOError:
                break
            except OSError as error:
                self._unsent.clear()
                self._failure = self._loss_of(error)
                self._lose_soon(self._failure)
                break
            del self._unsent[:sent]
        self._watch(bool(self._unsent))

    def _watch(self, is_writing: bool) -> None:
        if self._loop is not None and is_writing != self._is_writing:
            self._is_writing = is_writing
            if is_writing:
                self._loop.add_writer(self._connection, self._write)
            else:
                self._loop.remove_writer(self._connection)

    def _lose_soon(self, loss: Loss) -> None:
        """Not while somebody sends: the caller may be in the middle of telling several nodes."""
        if self._loop is not None:
            self._loop.call_soon(self._lose_after_last_words, loss)

    def _lose_after_last_words(self, loss: Loss) -> None:
        """Hear first what the other end said before it went: a failed send is no end of reading."""
        while self._loop is not None and loss.kind is LossKind.PROOF:
            try:
                data = self._connection.recv(RECEIVE_BYTES)
            except OSError:
                break
            if not data:
                break
            self._take(data)
        self._lose(loss)

    def _lose(self, loss: Loss) -> None:
        if self._is_open and self._loop is not None:
            self.close()
            self._lost(loss)

    def _flushed(self, end: float) -> bool:
        while self._unsent:
            if not self._is_ready(select.POLLOUT, end):
                return False
            try:
                sent = self._connection.send(bytes(self._unsent[:_SEND_BYTES]))
            except BlockingIOError:
                continue
            del self._unsent[:sent]
        return True

    def _is_ready(self, event: int, end: float) -> bool:
        poll = select.poll()  # select() takes no descriptor above 1,023
        poll.register(self._connection, event)
        return bool(poll.poll(max(0.0, end - time.monotonic()) * 1000))


class _Turn:
    """A turn of a loop: at its end all links send to which something was said.

    Each of thousands by a call of the loop would take longer than what it says.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due = deque[NodeLink]()

    def add(self, link: NodeLink) -> None:
        """Something was said to it."""
        if not self._due:
            self._loop.call_soon(self._end)
        self._due.append(link)

    def _end(self) -> None:
        try:
            while self._due:
                self._due.popleft().end_turn()
        finally:  # what is too large for one stops no other
            if self._due:
                self._loop.call_soon(self._end)


_turn_of = Once(_Turn)
