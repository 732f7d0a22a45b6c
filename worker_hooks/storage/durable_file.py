"""A long file that goes to the disk while it is written.

The kernel would keep the data in memory and leave the disk idle until the final fsync, which then
takes long and reports nothing meanwhile. So every few megabytes are sent to the disk at once and
awaited a little later.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from worker_hooks.contract.atomic_file import FILE_MODE

PROGRESS_S = 0.5
WINDOW = 16 << 20  # bytes sent to the disk at once
_PENDING = 6  # windows that the disk may be behind
_PIECES = 1024  # of one writev, the most that Linux takes
_START, _AWAIT = 2, 7  # sync_file_range: begin to write; wait, write, wait
_UNABLE = {errno.EINVAL, errno.ENOSYS, errno.ESPIPE, errno.EOPNOTSUPP}

_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class DurableFile:
    """A new file, in a ``with``; it is removed if the block raises."""

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        """Create or empty the file; its folder must exist.

        Args:
            path: no symbolic link is followed.
            advance: called with the number of bytes that reached the disk since the last call; may
                raise to give up.

        Raises:
            OSError: it cannot be created.
        """
        self._path = path
        self._advance = advance
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, FILE_MODE)
        self.nbytes = 0  # written
        self._sent = 0  # bytes that were sent to the disk
        self._there = 0  # bytes that reached it
        self._has_ranges = _sync_file_range is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)
        if error is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def write(self, pieces: list[memoryview]) -> None:
        """Append the pieces.

        Raises:
            OSError: the disk is full, or gone.
        """
        left = pieces
        while left:
            count = self._writev(left[:_PIECES])
            self.nbytes += count
            done = 0
            while done < len(left) and count >= len(left[done]):
                count -= len(left[done])
                done += 1
            left = left[done:]
            if count:  # the disk took a part of a piece
                left = [left[0][count:], *left[1:]]
        self._send()

    def finish(self) -> None:
        """Wait until all is on the disk.

        Raises:
            OSError: it is not.
        """
        while self._has_ranges and self._there + WINDOW < self.nbytes:
            self._await()
        self._sync(os.fsync)

    def _writev(self, pieces: list[memoryview]) -> int:
        try:
            return os.writev(self._fd, pieces)
        except OSError as error:
            raise self._named(error) from None

    def _send(self) -> None:
        while self.nbytes - self._sent >= WINDOW:
            self._range(self._sent, _START)
            self._sent += WINDOW
        while self._sent - self._there > _PENDING * WINDOW:
            if self._has_ranges:
                self._await()
            else:
                self._sync(os.fdatasync)

    def _await(self) -> None:
        self._range(self._there, _AWAIT)
        self._there += WINDOW
        self._advance(WINDOW)

    def _sync(self, sync: Callable[[int], None]) -> None:
        try:
            sync(self._fd)
        except OSError as error:
            raise self._named(error) from None
        self._sent = max(self._sent, self.nbytes)
        self._advance(self.nbytes - self._there)
        self._there = self.nbytes

    def _range(self, start: int, how: int) -> None:
        if not self._has_ranges:
            return
        assert _sync_file_range is not None
        if _sync_file_range(self._fd, start, WINDOW, how) != 0:
            code = ctypes.get_errno()
            if code not in _UNABLE:
                raise self._named(OSError(code, os.strerror(code)))
            self._has_ranges = False  # this file system does not support it

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, os.fspath(self._path))


class ThrottledProgress:
    """An ``advance`` that reports the sum of bytes at most once in ``every_s`` seconds."""

    def __init__(self, tell: Callable[[int], object], every_s: float = PROGRESS_S) -> None:
        self._tell = tell
        self._every_s = every_s
        self._done = 0
        self._next_s = time.monotonic() + every_s

    def __call__(self, nbytes: int) -> None:
        """``nbytes`` more are done."""
        self._done += nbytes
        now_s = time.monotonic()
        if now_s > self._next_s:
            self._next_s = now_s + self._every_s
            self._tell(self._done)
