"""Takes the questions of ``msrun logs`` on this machine about ranks of other nodes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from agent.hooks.listener import listen
from agent.hooks.rank_links import Loop, Timer
from agent.nodes.frames import FrameError, FrameReader
from agent.nodes.line import bytes_of, message_in
from agent.nodes.run_messages import LogAsked, LogRead
from agent.nodes.vocabulary import CodecError
from agent.rank_logs.question import may_ask, name_of

MOST_ASKERS = 16
QUESTION_BYTES = 4 << 10
PATIENCE_S = 8.0  # for an answer of the controller's node; behind its own for the rank's node
RETRY_S = 1.0  # after descriptors ran out
TOO_MANY = f"{MOST_ASKERS} others read logs on this node by the same msrun"
SILENT = "the controller's node does not answer"


class _Asker:
    """One ``msrun logs``."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.timer: Timer | None = None  # until the answer is overdue

    def stop(self) -> None:
        """It is answered, or gone."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class LogDesk:
    """Listens for as long as the run lasts."""

    def __init__(self, record_id: str, ask: Callable[[LogAsked], object]) -> None:
        """``ask`` hands a question on; its answer comes by :meth:`hear`."""
        self._record_id = record_id
        self._ask = ask
        self._askers: dict[int, _Asker] = {}  # by the number of their questions
        self._count = 0
        self._listener: socket.socket | None = None

    def attach(self, loop: Loop) -> None:
        """Listen on ``loop``; where that cannot be, nobody can ask."""
        self._loop = loop
        try:
            self._listener = listen(name_of(self._record_id))
        except OSError:
            return
        self._watch()

    def _watch(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def hear(self, read: LogRead) -> None:
        """Tell who has asked, if he is still there."""
        asker = self._askers.get(read.question)
        if asker is None:
            return
        asker.stop()
        try:
            asker.connection.send(bytes_of(read))
        except OSError:  # he is gone, or asks for more than he reads
            self._drop(read.question)

    def close(self) -> None:
        """The run is over."""
        for number in tuple(self._askers):
            self._drop(number)
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener)
            listener.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            self._loop.remove_reader(self._listener)
            self._loop.call_later(RETRY_S, self._watch)
            return
        is_ours = may_ask(connection)
        if not is_ours or len(self._askers) >= MOST_ASKERS:
            if is_ours:
                with suppress(OSError):
                    connection.send(bytes_of(LogRead(0, why_not=TOO_MANY)))
            connection.close()
            return
        connection.setblocking(False)
        self._count += 1
        self._askers[self._count] = _Asker(connection)
        self._loop.add_reader(connection, self._read, self._count)

    def _read(self, number: int) -> None:
        asker = self._askers[number]
        try:
            packet = asker.connection.recv(QUESTION_BYTES)
            asked = FrameReader(message_in, QUESTION_BYTES).feed(packet)
        except BlockingIOError:
            return
        except (OSError, FrameError, CodecError):
            asked = []
        if len(asked) != 1 or not isinstance(asked[0], LogAsked):
            self._drop(number)
            return
        asker.stop()
        asker.timer = self._loop.call_later(PATIENCE_S, self._give_up, number)
        self._ask(asked[0]._replace(question=number))

    def _give_up(self, number: int) -> None:
        self.hear(LogRead(number, why_not=SILENT))

    def _drop(self, number: int) -> None:
        asker = self._askers.pop(number, None)
        if asker is not None:
            asker.stop()
            self._loop.remove_reader(asker.connection)
            asker.connection.close()
