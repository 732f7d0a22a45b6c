"""Text on stdout that every terminal and every pipe can take."""

from __future__ import annotations

import os
import sys

from agent.spec import UsageError


def put(text: str) -> None:
    """Write ``text`` whole; what the terminal's encoding lacks is written as an escape.

    Raises:
        UsageError: stdout cannot be written (a full disk).
        BrokenPipeError: nobody reads any more.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # None: msrun status >&-
    put_bytes(1, text.encode(encoding, errors="backslashreplace"))


def put_bytes(fd: int, data: bytes) -> None:
    """The same for bytes, which pass as they are.

    Raises:
        UsageError: the same.
        BrokenPipeError: nobody reads any more.
    """
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"the output cannot be written ({error.strerror})") from error
