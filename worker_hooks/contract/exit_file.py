"""The JSON file that requests a graceful exit: ``{"GracefulExit": 1}``.

A request from before the start does not count: the file must change while training runs, and nobody
removes the key again. An agent watches the file itself; ``ExitFile`` is for training without one.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time

log = logging.getLogger("msrun")

KEY = "GracefulExit"
LOOK_S = 0.5  # between two looks
MOST_BYTES = 65_536  # far more than such a file needs

Stamp = tuple[int, int, int, int]
"""Device, inode, size and time of the last change (ns): a new stamp means new content."""


class ExitFile:
    """One such file, which may be created at any time."""

    def __init__(self, path: str) -> None:
        """Remember the file as it is now."""
        self._path = path
        self._seen = stamp_of(path)
        self._next = 0.0
        if self._has_key():
            log.warning("%s asked to exit before this training began: that is ignored", path)

    def asks(self) -> bool:
        """Whether it was changed and now requests an exit. Looks twice a second at most."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOOK_S
        stamp = stamp_of(self._path)
        if stamp == self._seen:
            return False
        self._seen = stamp
        return self._has_key()

    def _has_key(self) -> bool:
        if self._seen is None:
            return False
        try:
            found = content_of(self._path)
        except ValueError as error:
            log.warning("Parse json file failed: %s, please check json file: %s", error, self._path)
            return False
        return isinstance(found, dict) and found.get(KEY) == 1


def stamp_of(path: str) -> Stamp | None:
    """By what a change of the file is noticed; ``None``: there is no file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def content_of(path: str) -> object:
    """The file's JSON; never blocks on a pipe.

    Raises:
        ValueError: it cannot be read; the message says why.
    """
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is no file")
            content = file.read(MOST_BYTES)
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from None
    try:
        found: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
    return found


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer
