"""The lines of a log as a terminal would have shown them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agent.text.sanitize import COLOUR

MAX_LINE_CHARS = 4000

# torch's excepthook writes "[rank3]: " before each line once a process group exists.
RANK_PREFIX = re.compile(r"\[rank\d+\]:(?: |$|(?=\[))")


def log_lines(tail: bytes, *, cut: bool) -> list[str]:
    """Lines as a terminal would have shown them; ``cut``: the first line is incomplete."""
    lines = tail.decode("utf-8", errors="replace").split("\n")
    if cut and len(lines) > 1:
        del lines[0]
    return [_shown(line) for line in lines]


def _shown(line: str) -> str:
    # A progress bar repaints its line after a carriage return: only the last painting is visible.
    last = line.rstrip("\r").rsplit("\r", 1)[-1]
    plain = RANK_PREFIX.sub("", COLOUR.sub("", last), count=1)
    return plain if len(plain) <= MAX_LINE_CHARS else plain[:MAX_LINE_CHARS] + "..."


def last_lines(lines: Sequence[str], count: int) -> tuple[str, ...]:
    """The last ``count`` lines, blank ones at the end not counted."""
    end = len(lines)
    while end and not lines[end - 1].strip():
        end -= 1
    return tuple(lines[max(0, end - count) : end])
