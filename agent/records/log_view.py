"""How the console shows one log file of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LogView:
    """How one file is shown."""

    path: Path
    fd: int  # 1 or 2: where it is shown; -1: not shown
    prefix: bytes | None  # before each line; None: bytes pass as they come
    filters: tuple[bytes, ...] = ()  # a line with one of these is copied ...
    filtered: Path | None = None  # ... to this file
    rank: int = -1  # whose output it is; -1: nobody's in particular
    folds: bool = False  # a traceback that another rank has printed is not shown again
