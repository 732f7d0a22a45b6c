"""Lists of small numbers as the kernel writes them: ``0-3,8``. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise

MAX_NUMBER = 1 << 20
"""More CPUs or ranks than any machine has; a longer range is a typing error."""


def parse_ranges(text: str) -> frozenset[int]:
    """Numbers of a list such as ``0-3,8``; empty for an empty text.

    Raises:
        ValueError: it is no such list; the text says which part.
    """
    parts = (part.strip() for part in text.split(","))
    return frozenset(number for part in parts if part for number in _numbers(part))


def parse_increasing(text: str, most: int) -> tuple[int, ...]:
    """The numbers of a text that :func:`format_ranges` wrote, in order, without making a set.

    Raises:
        ValueError: it did not write this text, or these are more than ``most`` numbers.
    """
    runs = [_numbers(part) for part in text.split(",")] if text else []
    if sum(map(len, runs)) > most:
        raise ValueError(f"more than {most} numbers")
    if any(after.start <= run.stop for run, after in pairwise(runs)):
        raise ValueError("the ranges are not in order, or touch each other")
    return tuple(chain.from_iterable(runs))


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
