"""Files of JSON objects, one a line, read as they grow."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 16


class JsonLines:
    """The lines of a file that grows; it need not exist yet."""

    def __init__(self, path: Path, than: int | None = None) -> None:
        """``than``: the inode of an earlier file of this name, which is about to be moved away."""
        self._path = path
        self._than = than
        self._file: int | None = None
        self._partial = b""

    def new(self) -> Iterator[dict[str, Any]]:
        """Those that are new and complete; one that a death has cut off is skipped.

        Raises:
            OSError: the file exists and cannot be read.
        """
        if self._file is None:
            try:
                file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            if os.fstat(file).st_ino == self._than:
                os.close(file)
                return
            self._file = file
        while chunk := os.read(self._file, CHUNK_BYTES):
            *whole, self._partial = (self._partial + chunk).split(b"\n")
            for line in whole:
                with contextlib.suppress(ValueError):
                    if isinstance(found := json.loads(line), dict):
                        yield found

    def close(self) -> int | None:
        """Read no more; the inode that was read."""
        if self._file is None:
            return None
        inode = os.fstat(self._file).st_ino
        os.close(self._file)
        return inode
