"""Small files of /proc and /sys; one that is not there or may not be read counts as empty."""

from __future__ import annotations

from pathlib import Path

_MOST_DIGITS = 20


def text(path: Path) -> str:
    """The content, without blanks around it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def lines(path: Path) -> list[str]:
    """Its lines."""
    return text(path).splitlines()


def number(path: Path) -> int | None:
    """A whole number; ``None``: there is none, or a word such as ``max``, or it is below 0."""
    word = text(path)
    return int(word) if _is_number(word) else None


def table(path: Path) -> dict[str, int]:
    """The numbers that stand second in their lines, by the word before."""
    rows = (line.split() for line in lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and _is_number(row[1])}


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= _MOST_DIGITS
