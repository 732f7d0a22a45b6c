"""Threads whose beginning may fail as that of any other thing does that the system gives."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable


def begin_thread(name: str, target: Callable[..., object], *args: object) -> None:
    """Call ``target`` in a thread that nobody waits for.

    Raises:
        OSError: there is none left. Python calls that a RuntimeError, which callers do not expect.
    """
    try:
        threading.Thread(target=target, args=args, name=name, daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"{os.strerror(errno.EAGAIN)} ({error})") from error
