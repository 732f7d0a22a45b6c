"""How messages travel between the processes of one node.

A message is one JSON object in one packet of a ``SOCK_SEQPACKET`` Unix socket: the kernel keeps
the borders, several writers do not mix, and a reader never waits for the rest of a message. No
pickle: what arrives is only data. File descriptors travel beside a message.
"""

from __future__ import annotations

import json
import os
import socket
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from worker_hooks.contract.protocol import Message, Preload, StartWorkers, WorkerOrder

MOST_FDS = 250  # beside one message; the kernel takes 253
_FD = 4  # bytes of a descriptor's number
PACKET_BYTES = 200_000  # below Linux's default socket buffer (net.core.wmem_default, 212,992)

_KINDS = {kind.__name__: kind for kind in get_args(Message)}


class ProtocolError(Exception):
    """The peer sent something this version does not know."""


def encode(message: Message) -> bytes:
    """One packet's bytes.

    Raises:
        ValueError: the message is larger than a packet may be.
    """
    fields = message._asdict()
    if isinstance(message, StartWorkers):
        fields["workers"] = [order._asdict() for order in message.workers]
    packet = json.dumps({"kind": type(message).__name__, **fields}).encode()
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
            return StartWorkers(int(fields["attempt"]), orders, bool(fields.get("keeps", False)))
        if kind is Preload:
            return Preload(tuple(fields["modules"]))
        message: Message = kind(**fields)
        _check(message)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"unreadable message {packet[:80]!r}: {error!r}") from error
    return message


def _check(message: Message) -> None:
    """Refuse fields of another type than declared: the receiver uses them unchecked."""
    kind: Any = type(message)  # typed Any: cache() needs a hashable
    for declared, value in zip(_declared(kind), message, strict=True):
        if type(value) is not declared and (declared, type(value)) != (float, int):
            raise TypeError(f"{value!r:.40} is no {declared.__name__}")


@cache
def _declared(kind: Any) -> tuple[type, ...]:
    return tuple(get_origin(hint) or hint for hint in get_type_hints(kind).values())


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


def _next_packet(link: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    room = socket.CMSG_SPACE(MOST_FDS * _FD)
    # not socket.recv_fds: it drops flags, and every child would inherit the descriptors
    packet, beside, _, _ = link.recvmsg(PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    return packet, beside


def receive(link: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message and the descriptors that came with it; ``None`` when the peer is gone.

    Raises:
        ProtocolError: the peer sent something unknown.
        BlockingIOError: the link does not block and holds no message.
    """
    try:
        packet, beside = _next_packet(link)
    except ConnectionResetError:  # once, if the peer died with unread messages of ours
        packet, beside = _next_packet(link)  # what it had sent before still waits here
    fds = array("i")
    for level, kind, octets in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(octets[: len(octets) // _FD * _FD])
    try:
        return (decode(packet) if packet else None), list(fds)
    except ProtocolError:
        for fd in fds:
            os.close(fd)
        raise
