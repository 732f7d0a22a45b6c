"""The JSON file in which a graceful exit is asked for: ``{"GracefulExit": 1}``.

A request that was there before is none: what counts is that the file was changed, and the key is
not taken out again. Where there is an agent, it watches the file; this is for a training without.
"""

from __future__ import annotations

import json
import logging
import os
import time

log = logging.getLogger("msrun")

KEY = "GracefulExit"
LOOK_S = 0.5  # between two looks


class ExitFile:
    """One such file, which may come to be at any time."""

    def __init__(self, path: str) -> None:
        """Take it as it is now."""
        self._path = path
        self._seen = self._sign()
        self._next = 0.0
        if self._asks():
            log.warning("%s asked to exit before this training began: that is ignored", path)

    def asks(self) -> bool:
        """Whether it was changed, and asks now. Looks twice a second at most."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOOK_S
        sign = self._sign()
        if sign == self._seen:
            return False
        self._seen = sign
        return self._asks()

    def _sign(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _asks(self) -> bool:
        if self._seen is None:
            return False
        try:
            with open(self._path, "rb") as file:
                found = json.load(file)
        except (OSError, ValueError, RecursionError) as error:
            log.warning("Parse json file failed: %s, please check json file: %s", error, self._path)
            return False
        return isinstance(found, dict) and found.get(KEY) == 1
