"""How ``msrun logs`` asks the msrun of a run on its machine for the log of another node's rank.

One packet a question, one an answer, over a socket in Linux's abstract namespace. Both ends look
who the other one is: only the user of the job may ask, and nobody else can answer.
"""

from __future__ import annotations

import os
import socket

from agent.hooks.listener import peer_of
from agent.nodes.frames import FrameError, FrameReader
from agent.nodes.line import bytes_of, message_in
from agent.nodes.run_messages import LogAsked, LogRead
from agent.nodes.vocabulary import CodecError

ANSWER_S = 10.0  # longer than msrun waits for other nodes
PACKET_BYTES = 200_000  # below Linux's default socket buffer
ROOT = 0


class NoAnswerError(Exception):
    """Nobody answers: a verb phrase of msrun."""


def name_of(record_id: str) -> str:
    """The name of a run's socket, without the leading NUL."""
    return f"msrun-{record_id}-logs"


class LogLine:
    """A connection to the msrun of a run."""

    def __init__(self, record_id: str, pid: int) -> None:
        """Connect to the msrun with this process id.

        Raises:
            NoAnswerError: it does not listen.
        """
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(ANSWER_S)
        try:
            self._line.connect(f"\0{name_of(record_id)}")
            other, _ = peer_of(self._line)
        except OSError as error:
            self._line.close()
            raise NoAnswerError(f"cannot be asked ({error.strerror or error})") from error
        if other != pid:
            self._line.close()
            raise NoAnswerError(f"cannot be asked (process {other} has its socket)")

    def fileno(self) -> int:
        """Its descriptor."""
        return self._line.fileno()

    def ask(self, asked: LogAsked) -> None:
        """Ask. If nobody hears it, what was said before may still be to be read.

        Raises:
            NoAnswerError: msrun takes no question.
        """
        try:
            self._line.send(bytes_of(asked))
        except TimeoutError as error:
            raise NoAnswerError("does not answer") from error
        except OSError:
            return  # it has ended, as is heard behind its last answer

    def answer(self) -> LogRead:
        """The next answer.

        Raises:
            NoAnswerError: there is none.
        """
        try:
            packet = self._next()
            (read,) = FrameReader(message_in).feed(packet) if packet else (None,)
        except TimeoutError as error:
            raise NoAnswerError("does not answer") from error
        except (OSError, FrameError, CodecError, ValueError) as error:
            raise NoAnswerError(f"cannot be understood ({error!s:.200})") from error
        if not isinstance(read, LogRead):
            raise NoAnswerError("has ended")
        return read

    def _next(self) -> bytes:
        try:
            return self._line.recv(PACKET_BYTES)
        except ConnectionResetError:  # once, if a question was unread as the other end closed
            return self._line.recv(PACKET_BYTES)  # what it had said before still waits here

    def close(self) -> None:
        """Ask no more."""
        self._line.close()


def may_ask(connection: socket.socket) -> bool:
    """Whether the other end may read what this user's ranks print: it may stop the job, too."""
    return peer_of(connection)[1] in {os.geteuid(), ROOT}
