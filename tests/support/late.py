"""A module that is imported when a test first uses it: all processes that find tests would wait."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """Frameworks take seconds, and a gigabyte in each process."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
