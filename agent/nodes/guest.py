"""A connection that has not proved yet that it belongs to the job.

Anybody may connect to MASTER_PORT: port scanners, health checks, browsers, other jobs. A guest that
says anything else than a node's msrun is turned away without a word. It never makes others wait,
and it cannot take more memory than one small message.
"""

from __future__ import annotations

import socket
import time

from agent.nodes.frames import PREAMBLE, STRANGER_BYTES, FrameError, FrameReader, message_of
from agent.nodes.line import Line, bytes_of, plain_address
from agent.nodes.messages import Challenge, Join, Newer, Refused, StopGathering, unpack
from agent.nodes.roster import is_plausible, named, why_other_version
from agent.nodes.token import Proofs, Side, new_nonce, why_unproven
from agent.nodes.vocabulary import CodecError

ANSWER_S = 5.0  # for a guest to say who it is, and to leave once it is refused
WRONG = 2  # the exit code of a node that asked for something wrong


class StrangerError(Exception):
    """Who connected is none of the job's nodes, or has gone: close the connection."""


class Guest:
    """One connection, from its acceptance until it is one of the job's lines or closed."""

    def __init__(self, connection: socket.socket, address: str, version: str) -> None:
        """Take the connection over; ``version``: this msrun's."""
        connection.setblocking(False)
        self.connection = connection
        self.address = plain_address(address)
        self.join: Join | None = None  # once it is proven
        self.is_refused = False
        self.since = time.monotonic()
        self._version = version
        self._preamble = PREAMBLE  # what is still to come of it
        self._nonce = new_nonce()
        self._reader = FrameReader(message_of, STRANGER_BYTES)
        self._unsent = b""

    @property
    def is_unknown(self) -> bool:
        """Whether it still has to say who it is."""
        return self.join is None and not self.is_refused

    @property
    def is_new(self) -> bool:
        """Whether it has said nothing yet."""
        return self._preamble == PREAMBLE

    def fileno(self) -> int:
        """The connection's descriptor, for selectors."""
        return self.connection.fileno()

    def hear(self, token: bytes) -> Join | Refused | StopGathering | Newer | None:
        """Read what has come. Never waits.

        Returns:
            A proven Join; or why there is none, for :meth:`refuse`; once it has joined, that nobody
            is to wait any more, or its answer; ``None``: nothing new.

        Raises:
            StrangerError: it is of no use.
        """
        data = self._received()
        if self.is_refused or data is None:
            return None
        if self._preamble:
            data = self._after_preamble(data)
        self._reader.add(data)
        try:
            packed = self._reader.take()
            if packed is None:
                return None
            if self.join is not None:
                if isinstance(said := unpack(packed), StopGathering | Newer):
                    return said
                raise StrangerError("speaks before the job has begun")
            return self._judged(packed, token)
        except (FrameError, CodecError) as error:
            raise StrangerError(str(error)) from error

    def refuse(self, refused: Refused) -> None:
        """Say why it cannot take part. It is to close the connection; what it still says is lost.

        Closing first could take the words back: the kernel resets a connection with unread data.
        """
        self.join, self.is_refused = None, True
        self.since = time.monotonic()
        self.say(bytes_of(refused))
        try:
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:  # it has gone
            return

    def say(self, frames: bytes) -> None:
        """Send messages, as far as the kernel takes them; :meth:`line` hands on the rest."""
        data = self._unsent + frames
        try:
            sent = self.connection.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # it has gone, which its next reader sees
            return
        self._unsent = data[sent:]

    def proof(self, token: bytes) -> str:
        """What proves this side to a guest that has joined."""
        assert self.join is not None
        return self._proofs(self.join).proof(token, Side.CONTROLLER)

    def line(self) -> Line:
        """The connection, which is one of the job's from now on."""
        return Line(self.connection, self._reader.rest(), self._unsent)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _received(self) -> bytes | None:
        try:
            data = self.connection.recv(STRANGER_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise StrangerError("is gone") from error
        if not data:
            raise StrangerError("is gone")
        return data

    def _after_preamble(self, data: bytes) -> bytes:
        begin = data[: len(self._preamble)]
        if not self._preamble.startswith(begin):
            raise StrangerError("is no msrun")
        self._preamble = self._preamble[len(begin) :]
        if not self._preamble:
            self.say(bytes_of(Challenge(self._nonce, self._version)))
        return data[len(begin) :]

    def _judged(self, packed: dict[str, object], token: bytes) -> Join | Refused:
        version = packed.get("version")
        if version != self._version and isinstance(version, str) and packed["kind"] == "Join":
            # its other fields may be others, too
            why = why_other_version(f"a node at {self.address}", f"{version!r:.20}", self._version)
            return Refused(why, WRONG)
        join = unpack(packed)
        if not isinstance(join, Join) or not is_plausible(join):
            raise StrangerError(f"{packed!r:.80} is no Join")
        if not self._proofs(join).is_proven(join.proof, token, Side.NODE):
            who = named(join.host, self.address)
            return Refused(why_unproven(who, join.proof, token), WRONG, is_of_token=True)
        self.join = join
        return join

    def _proofs(self, join: Join) -> Proofs:
        return Proofs(join.run_id, self._nonce, join.nonce)
