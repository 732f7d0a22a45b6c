"""One TCP connection between two nodes' msrun, and what its end means.

Proof of death and silence are two things. The kernel of a living machine tells at once that a
process is gone; of a machine that is off, or behind a cut cable, nothing is heard, and it may be
well and alone. Only keepalive *and* TCP_USER_TIMEOUT notice silence: no probe is sent while data is
unacknowledged, and on an idle line there is no data.

The kernel counts from the first byte that it sends again, and so notices somewhere in the second
behind the limit, at each end at another moment. A link notices at that second's end at the latest,
and says how late it is: how long others wait counts from the last byte heard.

The kernel repeats unacknowledged data after 0.2, 0.6, 1.4, 3.0, 6.2 and 12.6 seconds. A cable that
is back after 7 seconds would be noticed behind the limit alone, so the kernel is told to wait no
longer than a second, where it can be told (Linux 6.15).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from agent.nodes.frames import frame, message_of
from agent.nodes.messages import NodeMessage, pack, unpack
from agent.nodes.run_messages import Beats, PageNews, PageSeen

LIMIT_S = 10.0  # of silence
CALM = 3  # times the limit that a msrun may say nothing while nobody waits for it
VERY_CALM = 12  # the same of node 0's, where nobody may go on without it
LATE_S = 1.0  # more, at most, until it is noticed: what was lost is sent again each second
TCP_RTO_MAX_MS = 44  # linux/tcp.h
AGAIN_MS = 1000  # at most, until data is sent again
RECEIVE_BYTES = 256 << 10  # at a time
_TCP_INFO = struct.Struct("=8B13I")  # the beginning of struct tcp_info, linux/tcp.h
_UNACKED, _DATA_HEARD, _ACK_HEARD = 12, 19, 20  # there; the last two: milliseconds ago
MOST_KNOWN = 1 << 10  # bytes of a message that is remembered
_GRAIN_S = 0.02  # of these times: two ticks of a slow kernel
_BYTES_ALONE = {kind.__name__: kind for kind in (Beats, PageNews, PageSeen)}
_PROOFS = {errno.ECONNRESET, errno.EPIPE, errno.ECONNREFUSED}


class Line(NamedTuple):
    """A connection that proved to belong to the job, and what its streams still hold."""

    connection: socket.socket
    heard: bytes = b""  # what was read beyond the last message
    unsent: bytes = b""


class LossKind(Enum):
    """What is known about the other end of a lost line."""

    PROOF = "proof"  # its process is gone, or has closed the line
    SILENCE = "silence"  # nothing: it may be alive, and go on alone
    MUTE = "mute"  # its machine answers, its msrun does not: it is stopped, and may be continued
    GIVEN_UP = "given up"  # it has closed the line to a process that was stopped for long: the same


class Loss(NamedTuple):
    """Why a line ended."""

    kind: LossKind
    why: str  # a verb phrase
    over_s: float = 0.0  # nothing was heard for so much longer than the limit, as it was noticed


def loss_of(error: OSError) -> Loss:
    """What an error of a connection means."""
    kind = LossKind.PROOF if error.errno in _PROOFS else LossKind.SILENCE
    return Loss(kind, f"is lost ({error.strerror or error})")


CLOSED = Loss(LossKind.PROOF, "closed the line")
MUTE = Loss(LossKind.MUTE, "has said nothing")
SILENT = loss_of(OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))


def set_options(connection: socket.socket, limit_s: float = LIMIT_S) -> None:
    """Let the kernel notice within about ``limit_s`` that the other machine is silent."""
    seconds = max(2, round(limit_s))
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(tcp, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, seconds - 1)
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, seconds * 1000)
    with suppress(OSError):  # an earlier kernel
        connection.setsockopt(tcp, TCP_RTO_MAX_MS, AGAIN_MS)


class Pulse:
    """Whether the machine at the other end answers: its kernel does, whatever its msrun does."""

    def __init__(self, connection: socket.socket) -> None:
        """Look at this one; something must be said after each look, for the next one."""
        self._connection = connection
        self._looked_s = time.monotonic()

    def is_missed(self) -> bool:
        """Whether something is not acknowledged, and nothing was heard since the last look.

        ``False`` where the kernel cannot tell.
        """
        now_s = time.monotonic()
        since_s, self._looked_s = now_s - self._looked_s, now_s
        unacked, unheard_s = self._told()
        return unacked > 0 and unheard_s > since_s + _GRAIN_S

    def unheard_s(self) -> float:
        """How long nothing was heard; an idle line is asked each second. 0: it cannot be told."""
        return self._told()[1]

    def limit_s(self) -> float:
        """How long nothing may be heard, as :func:`set_options` was told; 0: it was not."""
        try:
            told = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        except OSError:
            return 0.0
        return told / 1000

    def _told(self) -> tuple[int, float]:
        """What is not acknowledged, and how long ago anything was heard."""
        try:
            told = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:  # no TCP, or it is over, which is told elsewhere
            return 0, 0.0
        if len(told) < _TCP_INFO.size:
            return 0, 0.0
        info = _TCP_INFO.unpack(told)
        return info[_UNACKED], min(info[_DATA_HEARD], info[_ACK_HEARD]) / 1000


def bytes_of(message: NodeMessage, *, is_deflated: bool = False) -> bytes:
    """A message's frame; ``is_deflated``: it repeats itself, and goes to many.

    Raises:
        FrameError: it is too large.
    """
    return frame(pack(message), is_deflated=is_deflated)


def message_in(body: bytes, octets: bytes) -> NodeMessage:
    """The message of a frame. What thousands of nodes say alike is read once.

    Raises:
        FrameError, CodecError: it is none that this version knows.
    """
    if len(body) > MOST_KNOWN:
        return unpack(message_of(body, octets))
    if not octets:
        return _known(body)
    if (kind := _known_kind(body, len(octets))) is not None:
        return kind(octets)
    return unpack(message_of(body, octets))


@lru_cache(maxsize=64)
def _known(body: bytes) -> NodeMessage:
    return unpack(message_of(body, b""))


@lru_cache(maxsize=64)
def _known_kind(body: bytes, size: int) -> Callable[[bytes], NodeMessage] | None:
    """The kind of a message that is so many bytes, and nothing else; ``None``: it is no such."""
    message = message_of(body, b"")
    kind = _BYTES_ALONE.get(str(message["kind"]))
    return kind if message == {"kind": message["kind"], "packed": size} else None


def plain_address(address: str) -> str:
    """An address without the prefix that a socket for IPv4 and IPv6 gives those of IPv4."""
    return address.removeprefix("::ffff:")
