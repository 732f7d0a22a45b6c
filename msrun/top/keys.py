"""Keys as words. Pure: the bytes of a terminal in, keys out."""

from __future__ import annotations

import re
from collections.abc import Mapping

ESCAPE = b"\x1b"
SEQUENCE = re.compile(rb"\x1b(?:O.|\[[0-?]*[ -/]*[@-~])")  # ECMA-48
BEGUN = re.compile(rb"\x1b(?:O|\[[0-?]*[ -/]*)?")
PLAIN = {
    b"q": "quit",
    b"Q": "quit",
    b"k": "up",
    b"j": "down",
    b"g": "first",
    b"G": "last",
    b"l": "log",
    b"\r": "log",
    b"\n": "log",
    b" ": "page down",
    b"b": "page up",
    b"\x06": "page down",  # Ctrl-F
    b"\x02": "page up",
}
SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "first",
    b"\x1bOH": "first",
    b"\x1b[1~": "first",
    b"\x1b[F": "last",
    b"\x1bOF": "last",
    b"\x1b[4~": "last",
}


def keys(
    data: bytes, *, is_all: bool, plain: Mapping[bytes, str] = PLAIN
) -> tuple[list[str], bytes]:
    """The keys in ``data``, and the remaining bytes that may begin one more.

    Args:
        data: as read from the terminal. Unknown keys are left out.
        is_all: no bytes follow, so a single escape is the Esc key (``back``).
        plain: what single bytes mean.
    """
    found: list[str] = []
    while data:
        if not data.startswith(ESCAPE):
            found += [plain[data[:1]]] if data[:1] in plain else []
            data = data[1:]
        elif (sequence := SEQUENCE.match(data)) is not None:
            found += [SEQUENCES[sequence[0]]] if sequence[0] in SEQUENCES else []
            data = data[sequence.end() :]
        elif BEGUN.fullmatch(data) and not is_all:
            return found, data
        else:
            found.append("back")
            data = data[1:]
    return found, b""
