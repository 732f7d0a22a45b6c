"""How messages travel on a stream: the length in four bytes, then one JSON object. Pure.

A ``SOCK_SEQPACKET`` keeps the borders of ``worker_hooks.contract.wire``; TCP does not.
"""

from __future__ import annotations

import json
import zlib
from binascii import a2b_base64
from collections.abc import Mapping

PREAMBLE = b"msrun"
"""What the node that dials says first: a listener tells the control link from other clients."""
MOST_BYTES = 16 << 20  # of a message
STRANGER_BYTES = 64 << 10  # of a message before the peer has proved that it belongs to the job
_LENGTH = 4
_DEFLATED = 1 << 31  # in the length
_decode = json.JSONDecoder().raw_decode  # without white space around it, as we write it


class FrameError(Exception):
    """What came is no frame, or a message is larger than a frame may be."""


def frame(message: Mapping[str, object], *, is_deflated: bool = False) -> bytes:
    """One message's bytes.

    Args:
        message: as JSON.
        is_deflated: whether to compress it: one that repeats itself, and goes to many.

    Raises:
        FrameError: the message is too large.
    """
    # ASCII only: halves of surrogate pairs, as in odd file names, survive the journey
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MOST_BYTES:
        raise FrameError(f"{message.get('kind')} of {len(body)} bytes is over {MOST_BYTES}")
    if is_deflated:
        body = zlib.compress(body, 1)
        return (_DEFLATED | len(body)).to_bytes(_LENGTH, "big") + body
    return len(body).to_bytes(_LENGTH, "big") + body


def octets_of(text: str) -> bytes:
    """The bytes that a message has as base64; to be strict takes half the time.

    Raises:
        ValueError: it is no base64.
    """
    return a2b_base64(text, strict_mode=True)


class FrameReader:
    """Makes messages of the bytes of a stream, in whatever pieces they arrive.

    It keeps one unfinished frame at most, which is bounded by ``limit``, and what was added beyond
    it: who adds bytes takes all messages out before adding more.
    """

    def __init__(self, limit: int = MOST_BYTES) -> None:
        """``limit``: the most bytes of a message. It may be raised later."""
        self.limit = limit
        self._bytes: bytes | bytearray = b""
        self._at = 0  # what was taken of them

    def feed(self, data: bytes) -> list[dict[str, object]]:
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

    def take(self) -> dict[str, object] | None:
        """The next message; ``None`` while it is incomplete.

        Raises:
            FrameError: this is no frame.
        """
        start = self._at + _LENGTH
        if len(self._bytes) < start:
            return None
        length = int.from_bytes(self._bytes[self._at : start], "big")
        is_deflated, length = bool(length & _DEFLATED), length & ~_DEFLATED
        if length > self.limit:
            raise FrameError(f"a message of {length} bytes is over {self.limit}")
        end = start + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[start:end])
        self._at = end
        if end == len(self._bytes):
            self._bytes, self._at = b"", 0
        return _message(_inflated(body, self.limit) if is_deflated else body)

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


def _message(body: bytes) -> dict[str, object]:
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
    return message
