"""A worker's stdout and stderr that survive a full disk: lines are lost, training continues.

The worker writes its log file itself, so on a full disk ``print`` would raise an OSError and end
days of work for a line of text. Everything else about the streams is as Python made them.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys

LOST = frozenset({errno.ENOSPC, errno.EDQUOT})


class FileIO(io.FileIO):  # the same name as Python's own
    """A raw file that drops what the disk does not accept."""

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        """Write or drop ``data``; its length in bytes."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in LOST:
                raise
            return memoryview(data).nbytes


FileIO.__module__ = "_io"


def make_tolerant() -> None:
    """Replace the streams that are regular files; in a worker, before the user's first line."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper) and stat.S_ISREG(os.fstat(old.fileno()).st_mode):
            new = _tolerant(old)
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)


def _tolerant(old: io.TextIOWrapper) -> io.TextIOWrapper:
    raw = FileIO(old.fileno(), "wb", closefd=False)
    raw.name = old.name
    new = io.TextIOWrapper(
        raw,  # unbuffered, as with python -u
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )
    new.mode = "w"  # type: ignore[misc]  # Python sets it, too
    return new
