"""Numbers in the JSON of a run, which are null where they are not known."""

from __future__ import annotations

from typing import Any


def float_or_none(value: Any) -> float | None:
    """The number.

    Raises:
        TypeError, ValueError: it is none.
    """
    return None if value is None else float(value)


def int_or_none(value: Any) -> int | None:
    """The whole number.

    Raises:
        TypeError, ValueError: it is none.
    """
    return None if value is None else int(value)
