"""The JSON file in which a graceful exit is asked for: ``{"GracefulExit": 1}``.

A request that was there before is none: what counts is that the file was changed, and the key is
not taken out again. Where there is an agent, it watches the file; ``ExitFile`` is for a training
without.
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
MOST_BYTES = 65_536  # of a file that says so little

Stamp = tuple[int, int, int, int]
"""Device, inode, size and time of the last change (ns): another stamp means another content."""


class ExitFile:
    """One such file, which may come to be at any time."""

    def __init__(self, path: str) -> None:
        """Take it as it is now."""
        self._path = path
        self._seen = stamp_of(path)
        self._next = 0.0
        if self._asks():
            log.warning("%s asked to exit before this training began: that is ignored", path)

    def asks(self) -> bool:
        """Whether it was changed, and asks now. Looks twice a second at most."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOOK_S
        sign = stamp_of(self._path)
        if sign == self._seen:
            return False
        self._seen = sign
        return self._asks()

    def _asks(self) -> bool:
        if self._seen is None:
            return False
        try:
            found = content_of(self._path)
        except ValueError as error:
            log.warning("Parse json file failed: %s, please check json file: %s", error, self._path)
            return False
        return isinstance(found, dict) and found.get(KEY) == 1


def stamp_of(path: str) -> Stamp | None:
    """What tells a changed file; ``None``: there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def content_of(path: str) -> object:
    """What the file's JSON says; never waits for a pipe's other end.

    Raises:
        ValueError: it cannot be understood; says why.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
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


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer
