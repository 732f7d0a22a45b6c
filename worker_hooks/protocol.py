"""What processes of one node say to each other: small messages over a local socket.

A message is one JSON object in one packet of a ``SOCK_SEQPACKET`` Unix socket: the kernel keeps
the borders, several writers do not mix, and a reader never waits for the rest of a message. No
pickle: what arrives can be trusted to be data. File descriptors travel beside a message.

    agent -> forkserver    StartWorkers, StartStore, Preload
    forkserver -> agent    Ready, Forked, ForkFailed, StoreForked
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

PACKET_BYTES = 200_000  # below Linux's default socket buffer (net.core.wmem_default, 212,992)
BATCH = 32  # workers in one StartWorkers: their environments stay well below a packet


class ProtocolError(Exception):
    """The peer sent something this version does not know."""


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """How one worker comes to life."""

    rank: int
    argv: tuple[str, ...]
    environ: dict[str, str]  # on top of the forkserver's own
    stdout: str  # a path to append to; empty: the forkserver's own stream
    stderr: str
    cpus: tuple[int, ...] = ()  # empty: no binding


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start these workers, all of one attempt."""

    attempt: int
    workers: tuple[WorkerOrder, ...]


@dataclass(frozen=True, slots=True)
class StartStore:
    """Serve a TCPStore on the listening socket that travels beside this message."""

    attempt: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Preload:
    """Import these modules now, to be warm for a restart."""

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The forkserver can fork; ``problem`` says why its warmth must not be used, if so."""

    preload_s: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Forked:
    """A worker's process exists."""

    rank: int
    attempt: int
    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed:
    """A worker's process could not be made, or could not become what was ordered."""

    rank: int
    attempt: int
    why: str


@dataclass(frozen=True, slots=True)
class StoreForked:
    """The store host's process exists; ``pid`` 0 and ``why``: it does not."""

    attempt: int
    pid: int
    why: str = ""


Message = StartWorkers | StartStore | Preload | Ready | Forked | ForkFailed | StoreForked
_KINDS = {
    kind.__name__: kind
    for kind in (StartWorkers, StartStore, Preload, Ready, Forked, ForkFailed, StoreForked)
}


def encode(message: Message) -> bytes:
    """One packet's bytes.

    Raises:
        ValueError: the message is larger than a packet may be.
    """
    packet = json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()
    if len(packet) > PACKET_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(packet)} bytes is over {PACKET_BYTES}")
    return packet


def decode(packet: bytes) -> Message:
    """The message in a packet.

    Raises:
        ProtocolError: not a message, or not one this version knows.
    """
    try:
        fields = json.loads(packet)
        kind = _KINDS[fields.pop("kind")]
        if kind is StartWorkers:
            orders = tuple(_order(order) for order in fields["workers"])
            return StartWorkers(int(fields["attempt"]), orders)
        if kind is Preload:
            return Preload(tuple(fields["modules"]))
        message: Message = kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"unreadable message {packet[:80]!r}: {error!r}") from error
    return message


def _order(fields: dict[str, object]) -> WorkerOrder:
    order = WorkerOrder(**fields)  # type: ignore[arg-type]  # a wrong field raises TypeError
    return WorkerOrder(
        order.rank,
        tuple(order.argv),
        dict(order.environ),
        order.stdout,
        order.stderr,
        tuple(order.cpus),
    )


def send(link: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one message, with file descriptors beside it.

    Raises:
        OSError: the peer is gone.
    """
    socket.send_fds(link, [encode(message)], list(fds))


def receive(link: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message and the descriptors that came with it; ``None`` when the peer is gone.

    Raises:
        ProtocolError: the peer sent something unknown.
        BlockingIOError: the link does not block and holds no message.
    """
    try:
        packet, fds, _flags, _address = socket.recv_fds(link, PACKET_BYTES, 4)
    except ConnectionError:
        return None, []
    return (decode(packet) if packet else None), fds
