"""Replaces files atomically: write aside, sync, rename; then sync the folder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomic(
    path: Path, content: bytes, *, durable: bool = True, private: bool = False
) -> None:
    """Replace ``path`` so that a reader, even after a crash, sees the old or the new content.

    Args:
        path: the file to replace; its folder must exist.
        content: all of the new bytes.
        durable: it also survives a power cut (fsync of the file and of its folder).
        private: only the user may read it.

    Raises:
        OSError: nothing was replaced; the temporary file is gone.
    """
    aside = path.parent / f".{path.name}.{os.getpid()}_tmp"  # one writer a process

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600 if private else 0o666)

    try:
        with open(aside, "wb", opener=opener) as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    if durable:
        fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make new, renamed and removed names in a folder survive a power cut.

    Raises:
        OSError: they may not.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def describe_os_error(error: OSError) -> str:
    """An error of the file system as a part of a sentence: what is wrong, and with which file."""
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}"
