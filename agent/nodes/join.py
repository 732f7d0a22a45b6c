"""A node joins the job: it dials the controller's node until that answers, and waits to begin."""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from agent.nodes.frames import (
    MOST_BYTES,
    PREAMBLE,
    STRANGER_BYTES,
    FrameError,
    FrameReader,
    message_of,
)
from agent.nodes.gather import FIRST_WORD_S, MISSING, NEXT_WORD_S
from agent.nodes.guest import WRONG
from agent.nodes.line import CALM, LIMIT_S, RECEIVE_BYTES, VERY_CALM, Line, bytes_of, set_options
from agent.nodes.messages import (
    ANY_RANK,
    Admitted,
    AwaitedNodes,
    Begin,
    Challenge,
    Join,
    Newer,
    Refused,
    SeekNewer,
    Spare,
    StillThere,
    StopGathering,
    unpack,
)
from agent.nodes.roster import OwnNode, Roster, named, why_other_version
from agent.nodes.run_messages import NodeFacts
from agent.nodes.tls import PLAIN, Security, UntrustedError, is_of_trust, why_untrusted
from agent.nodes.token import Proofs, Side, new_nonce
from agent.nodes.vocabulary import CodecError
from agent.seat.records import NodeShare
from agent.spec.job_spec import StoppedEarlyError
from agent.text.wording import duration

DIAL_S = 5.0  # for one connection
CHALLENGE_S = 10.0  # the listener exists before anybody looks at it
LATER_S = 3.0  # that a node in the job waits for the word of the one that gathers
SHORTEST_S, LONGEST_S = 0.1, 1.0  # between two tries
HAS_NO_TLS = "the nodes of this job have no --tls-config: give it to all nodes, or to none"
LONGEST_WAIT_S = 3600.0  # in the kernel, which takes no infinite one
_GROWTH = 1.6


class RefusedError(Exception):
    """The job does not take this node: one sentence, and the exit code of msrun.

    ``is_over``: it has waited beside the job, which has come to its end.
    """

    def __init__(self, why: str, exit_code: int, *, is_over: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.exit_code = exit_code
        self.is_over = is_over


class NeverBegunError(Exception):
    """The job did not begin in time: one sentence with the address and the last error."""

    exit_code = MISSING


class NobodyThereError(Exception):
    """The one that was to gather the nodes is gone, or does not do so."""


class LostWhileSpareError(Exception):
    """Node 0 is lost while this node waits as a spare.

    ``nodes``: those of the job. ``is_mute``: node 0's machine answers, its msrun does not.
    """

    def __init__(self, nodes: tuple[NodeFacts, ...], why: str, *, is_mute: bool = False) -> None:
        super().__init__(why)
        self.is_mute = is_mute
        self.nodes = nodes
        self.why = why


class JoinedNode(NamedTuple):
    """The node takes part."""

    roster: Roster
    node_rank: int  # of this node
    settings: dict[str, object]
    line: Line  # to the controller's node


Where = Callable[[], tuple[str, int] | None]
"""Host and port at which nodes meet now; ``None``: where they were to meet first."""


def nowhere_else() -> tuple[str, int] | None:
    """Nodes meet where they were to meet."""
    return None


class AwaitedLine:
    """A line that a thread dials and waits for, until it is not wanted any more."""

    def __init__(self) -> None:
        """It is wanted."""
        self.is_over = threading.Event()
        """Set once nobody waits for it."""
        self._connection: socket.socket | None = None

    def opened(self, connection: socket.socket) -> None:
        """Takes each connection, as :func:`join` wants it; called in the thread.

        Raises:
            NobodyThereError: it is not wanted any more.
        """
        self._connection = connection
        if self.is_over.is_set():
            raise NobodyThereError

    def is_wanted(self, joined: JoinedNode) -> bool:
        """Whether what came is; else it is closed."""
        self._connection = None  # it is somebody else's now
        if self.is_over.is_set():
            joined.line.connection.close()
            return False
        return True

    def close(self) -> None:
        """End the wait in the thread."""
        self.is_over.set()
        if self._connection is not None:
            with suppress(OSError):  # it is closed already
                self._connection.shutdown(socket.SHUT_RDWR)


class _DialError(Exception):
    """One try came to nothing: a verb phrase about the other end."""


class _MuteError(_DialError):
    """The other end's msrun has said nothing for long, though its machine answers."""


def join(
    host: str,
    port: int,
    own: OwnNode,
    token: Callable[[], bytes],
    timeout_s: float | None,
    progress: Callable[[str], object],
    limit_s: float = LIMIT_S,
    waits_as_spare: Callable[[], object] = lambda: None,
    security: Security = PLAIN,
    is_once: bool = False,
    opened: Callable[[socket.socket], object] = lambda _: None,
    late_s: float = 0.0,
    where: Where = nowhere_else,
    shows: Callable[[str], object] = lambda _: None,
    seek: Callable[[SeekNewer], Newer] = lambda _: Newer(),
) -> JoinedNode:
    """Join the job whose controller listens at ``host:port``, and wait until it begins.

    The name may not resolve yet, nobody may listen yet, and whoever listens may die: it dials again
    until ``timeout_s`` (``None``: for ever) have passed. Once it has joined it is the controller's
    node that ends the wait, after its own time; this one does so only if nothing is heard of that.

    Args:
        host: name or address of the controller's node.
        port: where it listens.
        own: this node.
        token: reads the job's, once the controller's node has answered; empty: none.
        timeout_s: how long to wait in all.
        progress: takes a line for people now and then.
        limit_s: of the line's silence.
        waits_as_spare: called once it is known that this node waits for another one to be lost, for
            as long as the job runs; ``timeout_s`` counts no more.
        security: of the connection.
        is_once: dial once; of several nodes any may be the one that gathers the others.
        opened: takes each connection; who shuts it down ends this try.
        late_s: a token that is refused may be another one here after so long.
        where: asked before each connection; at another place no node has its rank of before.
        shows: takes who is missing, as the node says at which they meet.
        seek: answers what this node has saved.

    Raises:
        RefusedError: the job does not take this node, or is over and had no need of it.
        NeverBegunError: it did not begin in time.
        NobodyThereError: this one connection came to nothing.
        LostWhileSpareError: node 0 is lost, and other nodes may take its part.
    """
    dialling = _Dialling(
        host,
        port,
        own,
        token,
        timeout_s,
        progress,
        limit_s,
        waits_as_spare,
        security,
        opened,
        late_s,
        where,
        shows,
        seek,
    )
    return dialling.until_begun(is_once=is_once)


class _Dialling:
    """One attempt to join, of many connections perhaps."""

    def __init__(
        self,
        host: str,
        port: int,
        own: OwnNode,
        token: Callable[[], bytes],
        timeout_s: float | None,
        progress: Callable[[str], object],
        limit_s: float,
        waits_as_spare: Callable[[], object],
        security: Security,
        opened: Callable[[socket.socket], object],
        late_s: float,
        where: Where,
        shows: Callable[[str], object],
        seek: Callable[[SeekNewer], Newer],
    ) -> None:
        self._shows, self._seek = shows, seek
        self._late_s = late_s
        self._where_now = where
        self._refused_at: float | None = None  # because of the token, for the first time
        self._opened = opened
        self._security = security
        self._first_own, self._first = own, (host, port)
        self._turn_to(own, host, port)
        self._token = token
        self._progress = progress
        self._limit_s = limit_s
        self._waits_as_spare = waits_as_spare
        self._begin = time.monotonic()
        self._patience_s = float("inf") if timeout_s is None else timeout_s
        self._end = self._begin + self._patience_s
        self._word = self._begin + FIRST_WORD_S
        self._state = "has not answered yet"
        self._has_asked = False
        self._is_spare = False  # the job knows it
        self._nodes: tuple[NodeFacts, ...] = ()  # of the job that knows it

    def until_begun(self, *, is_once: bool) -> JoinedNode:
        """Dial until the job begins."""
        pause_s, end = SHORTEST_S, self._end
        while True:
            try:
                return self._dial()
            except _DialError as error:
                if self._is_spare:
                    what = "the job has ended, goes on with others, or has lost node 0"
                    why = f"{what}: {self._where} {error}"
                    if any(node.door for node in self._nodes):
                        is_mute = isinstance(error, _MuteError)
                        raise LostWhileSpareError(self._nodes, why, is_mute=is_mute) from error
                    raise RefusedError(why, MISSING) from error
                if is_once:
                    raise NobodyThereError(f"{self._where} {error}") from error
                self._state, self._end = str(error), end
                if self._own.is_spare and self._has_asked:
                    self._state = "has not begun the job yet"
            # not all at once: many nodes lose the same controller at the same moment
            self._pause(pause_s * random.uniform(0.5, 1.0))  # noqa: S311
            pause_s = min(LONGEST_S, pause_s * _GROWTH)

    def _dial(self) -> JoinedNode:
        connection = self._connected()
        try:
            self._opened(connection)
            return self._met(connection)
        except BaseException as error:
            if isinstance(error, StoppedEarlyError) and error.is_for_all and not self._is_spare:
                with suppress(OSError):
                    connection.sendall(bytes_of(StopGathering(str(error), error.signum)))
            connection.close()
            raise

    def _turn_to(self, own: OwnNode, host: str, port: int) -> None:
        self._own, self._host, self._port = own, host, port
        self._where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _connected(self) -> socket.socket:
        self._speak()
        if (now := self._where_now()) is None:
            self._turn_to(self._first_own, *self._first)
        else:
            self._turn_to(self._first_own._replace(node_rank=ANY_RANK), *now)
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "no host has such a name"
            raise _DialError(f"does not resolve ({why})") from error
        why = ""
        for family, kind, protocol, _, address in found:
            self._speak()
            connection = socket.socket(family, kind, protocol)
            try:
                set_options(connection, self._limit_s)
                connection.settimeout(self._within(DIAL_S))
                connection.connect(address)
                if connection.getsockname() != connection.getpeername():
                    return self._secured(connection)
                # nobody listens, and by chance this end got the very port that it dialled
                why = "does not answer (Connection refused)"
            except OSError as error:
                why = f"does not answer ({error.strerror or error})"
            except BaseException:
                connection.close()
                raise
            connection.close()
        raise _DialError(why)

    def _secured(self, connection: socket.socket) -> socket.socket:
        connection.settimeout(self._within(CHALLENGE_S))  # the listener exists before anybody looks
        at = connection.getpeername()
        try:
            return self._security.dialled(connection)
        except UntrustedError as error:
            raise RefusedError(f"{self._where} {error}", WRONG) from error
        except OSError as error:
            if self._security is not PLAIN and _is_msrun_without_tls(at, self._within(DIAL_S)):
                raise RefusedError(HAS_NO_TLS, WRONG) from error
            raise

    def _met(self, connection: socket.socket) -> JoinedNode:
        reader = FrameReader(message_of, STRANGER_BYTES)
        self._send(connection, PREAMBLE)
        challenge = self._next(connection, reader, time.monotonic() + CHALLENGE_S)
        if not isinstance(challenge, Challenge):
            raise _DialError("is no msrun that waits for nodes")
        own, nonce, token = self._own, new_nonce(), self._token()
        proofs = Proofs(own.run_id, challenge.nonce, nonce)
        wish = Join(
            own.run_id,
            own.record_id,
            own.node_rank,
            own.nproc,
            own.host,
            own.pid,
            own.version,
            own.torch,
            nonce,
            proofs.proof(token, Side.NODE),
            own.is_spare,
            own.door,
            own.survived,
            own.name,
            own.living,
            own.resumes,
            own.size,
            own.spent.told(time.monotonic()),
            own.place,
        )
        self._send(connection, bytes_of(wish))
        self._has_asked = True
        self._state = "waits for other nodes"
        # the other end has begun to wait before now, so that it is the first to know who is missing
        self._end = time.monotonic() + self._patience_s + LATER_S
        admitted = self._next(connection, reader, float("inf"))
        while isinstance(admitted, Spare | StillThere | AwaitedNodes | SeekNewer):
            if isinstance(admitted, AwaitedNodes):
                self._shows(admitted.text)
            elif isinstance(admitted, SeekNewer):
                self._send(connection, bytes_of(self._seek(admitted)))
            elif isinstance(admitted, Spare):
                self._wait_as_spare(admitted)
                reader.limit = MOST_BYTES  # it is told of all nodes, and of each change
            admitted = self._word_in_time(connection, reader)
        if not isinstance(admitted, Admitted):
            raise _DialError(f"says {type(admitted).__name__} where the job should begin")
        if not proofs.is_proven(admitted.proof, token, Side.CONTROLLER):
            why = f"{self._where} does not know the token of this job: is it another job's port?"
            raise RefusedError(why, WRONG)
        reader.limit = MOST_BYTES
        begin = self._next(connection, reader, float("inf"))
        if not isinstance(begin, Begin) or not _is_whole(begin, admitted.node_rank):
            raise _DialError("names nodes that cannot be")
        connection.setblocking(False)
        line = Line(connection, reader.rest())
        return JoinedNode(Roster(begin.nodes), admitted.node_rank, begin.settings, line)

    def _word_in_time(
        self, connection: socket.socket, reader: FrameReader[dict[str, object]]
    ) -> object:
        """The next message; a node that waits beside a job hears something all the time."""
        if not self._is_spare:
            return self._next(connection, reader, float("inf"))
        nodes = len(self._nodes)
        # where the others do not go on without it, they may wait until it is continued
        are_enough = NodeShare.of(nodes - 1, nodes) is NodeShare.MOST
        most_s = self._limit_s * (CALM if are_enough else VERY_CALM)
        end = time.monotonic() + most_s
        try:
            return self._next(connection, reader, end)
        except _DialError as error:
            if time.monotonic() < end:
                raise
            raise _MuteError(f"has said nothing for {duration(most_s)}") from error

    def _wait_as_spare(self, said: Spare) -> None:
        if not self._is_spare:
            self._waits_as_spare()
        self._is_spare, self._end, self._word = True, float("inf"), float("inf")
        self._nodes = said.nodes

    def _send(self, connection: socket.socket, data: bytes) -> None:
        connection.settimeout(self._within(DIAL_S))
        try:
            connection.sendall(data)
        except OSError as error:
            raise _DialError(f"is gone ({error.strerror or error})") from error

    def _next(
        self, connection: socket.socket, reader: FrameReader[dict[str, object]], end: float
    ) -> object:
        """The next message; people hear meanwhile what is waited for.

        Raises:
            RefusedError: the message is that this node is not taken.
        """
        while True:
            try:
                packed = reader.take()
                if packed is not None:
                    return self._understood(packed)
            except (FrameError, CodecError) as error:
                raise _DialError("is no msrun that waits for nodes") from error
            self._speak()
            if time.monotonic() >= end:
                raise _DialError("is silent: perhaps it is no msrun that waits for nodes")
            connection.settimeout(self._within(min(end, self._word) - time.monotonic()))
            if data := self._received(connection):
                reader.add(data)

    def _received(self, connection: socket.socket) -> bytes:
        """What has come within the connection's time-out; empty: nothing."""
        try:
            data = connection.recv(RECEIVE_BYTES)
        except (TimeoutError, BlockingIOError) as error:
            if isinstance(error, TimeoutError) and error.errno is not None:
                # not the bound above, but the kernel's: silence
                raise _DialError(f"is gone ({error.strerror})") from error
            return b""
        except ssl.SSLError as error:  # it has looked at this node's certificate only now
            if is_of_trust(error):
                raise RefusedError(f"{self._where} {why_untrusted(error)}", WRONG) from error
            raise _DialError(why_untrusted(error)) from error
        except OSError as error:
            raise _DialError(f"is gone ({error.strerror or error})") from error
        if not data:
            raise _DialError("closed the connection")
        return data

    def _understood(self, packed: dict[str, object]) -> object:
        version = packed.get("version")
        is_text = isinstance(version, str)
        if packed["kind"] == "Challenge" and is_text and version != self._own.version:
            # its other fields may be others, too
            who, its = named(self._own.host, self._own.address), f"{version!r:.20}"
            raise RefusedError(why_other_version(who, self._own.version, its), WRONG)
        message = unpack(packed)
        if isinstance(message, Refused):
            if message.is_of_token and self._may_be_late():
                raise _DialError("does not take this node's token")
            raise RefusedError(message.why, message.exit_code, is_over=self._is_spare)
        return message

    def _may_be_late(self) -> bool:
        """Whether the token may still be another one: file servers are late."""
        now = time.monotonic()
        self._refused_at = self._refused_at or now
        return now < self._refused_at + self._late_s

    def _within(self, seconds: float) -> float:
        """A bound for one wait, which lies within the whole; never 0, which means not to block."""
        return max(0.001, min(seconds, self._end - time.monotonic(), LONGEST_WAIT_S))

    def _pause(self, seconds: float) -> None:
        self._speak()
        time.sleep(min(seconds, max(0.0, self._end - time.monotonic())))

    def _speak(self) -> None:
        """Tell people what is waited for, if it is time to, and end with the time."""
        now = time.monotonic()
        if now >= self._end:
            waited = duration(now - self._begin)
            raise NeverBegunError(
                f"the job did not begin within {waited}: {self._where} {self._state}"
            )
        if now >= self._word:
            self._word = now + NEXT_WORD_S
            self._progress(f"waiting to begin: {self._where} {self._state}")


def _is_msrun_without_tls(at: tuple[Any, ...], within_s: float) -> bool:
    """Whether nodes meet there that have no certificates."""
    end = time.monotonic() + within_s
    reader = FrameReader(message_of, STRANGER_BYTES)
    with suppress(OSError, FrameError), socket.create_connection(at[:2], within_s) as plain:
        plain.sendall(PREAMBLE)
        while (packed := reader.take()) is None:
            plain.settimeout(max(0.001, end - time.monotonic()))
            if not (data := plain.recv(RECEIVE_BYTES)):
                return False
            reader.add(data)
        return packed["kind"] == "Challenge"
    return False


def _is_whole(begin: Begin, node_rank: int) -> bool:
    """Whether the nodes can be those of a job with this node in it."""
    # a controller may have no workers
    ranks = [node.rank for node in begin.nodes if node.nproc > 0 or node.rank == 0]
    return ranks == list(range(len(begin.nodes))) and node_rank in ranks
