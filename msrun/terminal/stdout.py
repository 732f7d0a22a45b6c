"""Text on stdout, whatever the terminal's encoding."""

from __future__ import annotations

import os
import sys

from agent.spec.job_spec import UsageError


class ReaderLeftError(Exception):
    """Nobody reads the output any more: there is nothing left to do, and it is no error."""


def put(text: str) -> None:
    """Write all of ``text``; characters that the encoding lacks are written as escapes.

    Raises:
        UsageError: stdout cannot be written, as on a full disk.
        ReaderLeftError: the reader is gone, as in ``msrun status | head``.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    put_bytes(1, text.encode(encoding, errors="backslashreplace"))


def put_bytes(fd: int, data: bytes) -> None:
    """The same for bytes, which are written unchanged."""
    if sys.stdout is None:  # `msrun status >&-`: the descriptor may be another file by now
        raise ReaderLeftError
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError as error:
        raise ReaderLeftError from error
    except OSError as error:
        raise UsageError(f"the output cannot be written ({error.strerror})") from error
