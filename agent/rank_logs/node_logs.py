"""What a node that another one controls does about logs: it reads its own, and asks for others."""

from __future__ import annotations

from collections.abc import Callable

from agent.hooks.rank_links import Loop
from agent.nodes.run_messages import ForLogs, LogAsked, LogRead
from agent.rank_logs.desk import LogDesk
from agent.rank_logs.reading import LogReader

ALONE = "the controller's node is lost, and no other one is there yet"


class NodeLogs:
    """A reader, and a desk whose questions go to the controller's node."""

    def __init__(self, reader: LogReader) -> None:
        """Take the parts; nothing is heard before :meth:`attach`."""
        self._reader = reader
        self._desk = LogDesk(reader.record_id, self._ask)

    def attach(
        self, loop: Loop, send: Callable[[ForLogs], None], is_open: Callable[[], bool]
    ) -> None:
        """Work on ``loop``.

        Args:
            loop: msrun's.
            send: tells the controller's node something.
            is_open: whether that can be told anything.
        """
        self._send, self._is_open = send, is_open
        self._reader.attach(loop)
        self._desk.attach(loop)

    def hear(self, message: ForLogs) -> None:
        """The controller's node has a question, or an answer."""
        if isinstance(message, LogAsked):
            self._reader.ask(message, self._send)
        else:
            self._desk.hear(message)

    def rest(self) -> None:
        """An attempt is over on this node: see LogReader.rest."""
        self._reader.rest()

    def close(self) -> None:
        """The run is over."""
        self._desk.close()

    def _ask(self, asked: LogAsked) -> None:
        if self._is_open():
            self._send(asked)
        else:
            self._desk.hear(LogRead(asked.question, why_not=ALONE))
