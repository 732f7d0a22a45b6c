"""The pixels of a screenshot, without an image library. Not a test itself."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

Pixel = tuple[int, int, int]


def rows(picture: Path) -> list[list[Pixel]]:
    """Rows of red, green and blue, from a PNG of 8 bits a channel (RFC 2083), not interlaced."""
    octets = picture.read_bytes()
    at, width, channels, packed = 8, 0, 0, b""
    while at < len(octets):
        (size,), kind = struct.unpack_from(">I", octets, at), octets[at + 4 : at + 8]
        chunk = octets[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, _, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", chunk)
            channels = {2: 3, 6: 4}[color]
            assert (depth, interlaced) == (8, 0)
        elif kind == b"IDAT":
            packed += chunk
        at += size + 12
    raw, stride = zlib.decompress(packed), width * channels
    found, above = [], bytearray(stride)
    for begin in range(0, len(raw), stride + 1):
        line = _unfiltered(
            raw[begin], bytearray(raw[begin + 1 : begin + 1 + stride]), above, channels
        )
        found.append(list(zip(*(line[each::channels] for each in range(3)), strict=True)))
        above = line
    return found


def _unfiltered(method: int, line: bytearray, above: bytearray, channels: int) -> bytearray:
    for at in range(len(line) if method else 0):
        left = line[at - channels] if at >= channels else 0
        corner = above[at - channels] if at >= channels else 0
        line[at] = (line[at] + _guess(method, left, above[at], corner)) & 0xFF
    return line


def _guess(method: int, left: int, up: int, corner: int) -> int:
    if method == 4:  # Paeth: the neighbour that is nearest to a plane through all three
        apart = [abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)]
        return (left, up, corner)[apart.index(min(apart))]
    return (0, left, up, (left + up) // 2)[method]
