"""The JSON files of a run, and numbers in them, which are null where they are not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worker_hooks.contract.atomic_file import read_small


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty: it holds none, or cannot be read."""
    try:
        found = json.loads(read_small(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
