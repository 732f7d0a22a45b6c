"""Text on stdout that every terminal and every pipe can take."""

from __future__ import annotations

import os
import sys

from agent.spec.job_spec import UsageError


class ReaderLeftError(Exception):
    """Nobody reads the output any more: there is nothing left to do, and nothing wrong."""


def put(text: str) -> None:
    """Write ``text`` whole; what the terminal's encoding lacks is written as an escape.

    Raises:
        UsageError: stdout cannot be written (a full disk).
        ReaderLeftError: ``msrun status | head``.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    put_bytes(1, text.encode(encoding, errors="backslashreplace"))


def put_bytes(fd: int, data: bytes) -> None:
    """The same for bytes, which pass as they are."""
    if sys.stdout is None:  # `msrun status >&-`: the number may be another file's by now
        raise ReaderLeftError
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError as error:
        raise ReaderLeftError from error
    except OSError as error:
        raise UsageError(f"the output cannot be written ({error.strerror})") from error
