"""Makes text of unknown origin safe for a terminal and for a line of JSON."""

from __future__ import annotations

import re

LATIN1 = 0xFF

COLOUR = re.compile(r"\x1b\[[0-9;:]*m")

# C0 without tab and newline, DEL, C1, line separators, and marks that change the direction.
HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def sanitized(text: str) -> str:
    """``text`` for a terminal: control characters become escape sequences in plain letters."""
    plain = COLOUR.sub("", text).replace("\r\n", "\n")
    return HARMFUL.sub(lambda found: spelled(ord(found[0])), plain)


def spelled(code: int) -> str:
    """A character as its escape sequence in Python's notation."""
    return f"\\x{code:02x}" if code <= LATIN1 else f"\\u{code:04x}"


def encodable(text: str) -> str:
    """``text`` without halves of surrogate pairs, which JSON may spell and no stream takes."""
    return text if text.isascii() else text.encode(errors="replace").decode()
