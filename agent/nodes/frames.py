"""How messages travel on a stream: the length in four bytes, then one JSON object. Pure.

Bytes that a message has are no JSON: they follow it, and it says how many each has.
A ``SOCK_SEQPACKET`` keeps the borders of ``worker_hooks.contract.wire``; TCP does not.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

M = TypeVar("M")

PREAMBLE = b"msrun"
"""What the node that dials says first: a listener tells the control link from other clients."""
MOST_BYTES = 16 << 20  # of a message
STRANGER_BYTES = 64 << 10  # of a message before the peer has proved that it belongs to the job
OCTETS = "octets"
"""The bytes beside a JSON object, in the order in which it has their lengths; no JSON has bytes."""
_LENGTH = 4
_unpack_length = struct.Struct(">I").unpack_from
_DEFLATED, _BESIDE = 1 << 31, 1 << 30  # in the length; the latter: that of the JSON object follows
_MOST = _BESIDE - 1
_decode = json.JSONDecoder().raw_decode  # without white space around it, as we write it


class FrameError(Exception):
    """What came is no frame, or a message is larger than a frame may be."""


def frame(message: Mapping[str, object], *, is_deflated: bool = False) -> bytes:
    """One message's bytes.

    Args:
        message: as JSON, but for bytes.
        is_deflated: whether to compress it: one that repeats itself, and goes to many.

    Raises:
        FrameError: the message is too large.
    """
    beside: list[bytes] = []

    def length(octets: bytes) -> int:
        beside.append(octets)
        return len(octets)

    # ASCII only: halves of surrogate pairs, as in odd file names, survive the journey
    body = json.dumps(message, separators=(",", ":"), default=length).encode()
    flag = _DEFLATED * is_deflated
    if beside:
        flag, body = _BESIDE, b"".join((len(body).to_bytes(_LENGTH, "big"), body, *beside))
    if len(body) > MOST_BYTES:
        raise FrameError(f"{message.get('kind')} of {len(body)} bytes is over {MOST_BYTES}")
    if flag == _DEFLATED:
        body = zlib.compress(body, 1)
    return (flag | len(body)).to_bytes(_LENGTH, "big") + body


class FrameReader(Generic[M]):
    """Makes messages of the bytes of a stream, in whatever pieces they arrive.

    It keeps one unfinished frame at most, which is bounded by ``limit``, and what was added beyond
    it: who adds bytes takes all messages out before adding more.
    """

    def __init__(self, made: Callable[[bytes, bytes], M], limit: int = MOST_BYTES) -> None:
        """Nothing has come.

        Args:
            made: what is made of a JSON object and the bytes beside it, as :func:`message_of`.
            limit: the most bytes of a message. It may be raised later.
        """
        self._made = made
        self.limit = limit
        self._bytes: bytes | bytearray = b""
        self._at = 0  # what was taken of them

    def feed(self, data: bytes) -> list[M]:
        """The messages that are complete with ``data``.

        Raises:
            FrameError: this is no frame. The stream cannot be read any further.
        """
        self.add(data)
        messages = []
        while (message := self.take()) is not None:
            messages.append(message)
        return messages

    def add(self, data: bytes) -> None:
        """Keep bytes for :meth:`take`."""
        if not self._bytes:  # as almost always: they are used where they are
            self._bytes = data
            return
        if self._at or not isinstance(self._bytes, bytearray):
            self._bytes, self._at = bytearray(self.rest()), 0
        self._bytes += data

    def take(self) -> M | None:
        """The next message; ``None`` while it is incomplete.

        Raises:
            FrameError: this is no frame.
        """
        octets, start = self._bytes, self._at + _LENGTH
        size = len(octets)
        if size < start:
            return None
        (length,) = _unpack_length(octets, self._at)
        flag, length = length & ~_MOST, length & _MOST
        if length > self.limit or flag == _DEFLATED | _BESIDE:
            raise FrameError(f"a message of {length} bytes is over {self.limit}")
        end = start + length
        if size < end:
            return None
        split = end
        if flag == _BESIDE:
            start, at = start + _LENGTH, start
            split = start + (_unpack_length(octets, at)[0] if start <= end else 0)
            if split > end:
                raise FrameError(f"a message of {length} bytes is cut short")
        body, beside = bytes(octets[start:split]), bytes(octets[split:end])
        self._at = end
        if end == size:
            self._bytes, self._at = b"", 0
        return self._made(_inflated(body, self.limit) if flag == _DEFLATED else body, beside)

    def rest(self) -> bytes:
        """The bytes that no message was made of, for another reader."""
        return bytes(self._bytes[self._at :])


def _inflated(body: bytes, limit: int) -> bytes:
    inflating = zlib.decompressobj()
    try:
        found = inflating.decompress(body, limit + 1)
    except zlib.error as error:
        raise FrameError(f"unreadable message {body[:80]!r}: {error}") from error
    if len(found) > limit or not inflating.eof:
        raise FrameError(f"a message of {len(body)} bytes is over {limit}, or cut short")
    return found


def message_of(body: bytes, octets: bytes) -> dict[str, object]:
    """A JSON object that names its kind, with the bytes beside it.

    Raises:
        FrameError: it is none.
    """
    try:
        # strictly UTF-8; of bytes json would accept UTF-16, too
        text = body.decode()
        message, end = _decode(text)
        if end < len(text):
            raise ValueError(f"{len(text) - end} characters too many")  # noqa: TRY301
    except (ValueError, RecursionError) as error:
        raise FrameError(f"unreadable message {body[:80]!r}: {error!r:.200}") from error
    if type(message) is not dict or type(message.get("kind")) is not str:
        raise FrameError(f"a message without a kind: {body[:80]!r}")
    if octets:
        message[OCTETS] = octets
    return message
