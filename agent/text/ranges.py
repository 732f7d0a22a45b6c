"""Lists of small numbers as the kernel writes them: ``0-3,8``. Pure."""

from __future__ import annotations

from collections.abc import Iterable

MAX_NUMBER = 1 << 20
"""More CPUs or ranks than any machine has; a longer range is a typing error."""


def parse_ranges(text: str) -> frozenset[int]:
    """Numbers of a list such as ``0-3,8``; empty for an empty text.

    Raises:
        ValueError: it is no such list; the text says which part.
    """
    parts = (part.strip() for part in text.split(","))
    return frozenset(number for part in parts if part for number in _numbers(part))


def _numbers(part: str) -> range:
    first, dash, last = part.partition("-")
    if not _plain(first) or (dash and not _plain(last)):
        raise ValueError(f"{part!r} is neither a number nor a range such as 0-3")
    begin, end = int(first), int(last if dash else first)
    if begin > end:
        raise ValueError(f"{part!r} runs backwards")
    if end > MAX_NUMBER:
        raise ValueError(f"{part!r} goes beyond {MAX_NUMBER}")
    return range(begin, end + 1)


def _plain(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10  # noqa: PLR2004


def format_ranges(numbers: Iterable[int]) -> str:
    """``0-3,8`` for 8, 0, 1, 2, 3; empty for no number."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
