"""What the threads of this process are doing."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

COLLECTS_AMID = sys.version_info < (3, 12)
"""Whether garbage may be collected while the interpreter makes the list of its threads' frames."""


class _Garbage:
    """The collection of garbage, which stops while a thread looks at all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_stopped = False
        os.register_at_fork(after_in_child=self.begin_in_child)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._is_stopped = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._is_stopped:
            gc.enable()
        self._is_stopped = False
        self._lock.release()

    def begin_in_child(self) -> None:
        """The process may have been copied while another thread was looking."""
        self._lock = threading.Lock()
        if self._is_stopped:
            gc.enable()
        self._is_stopped = False


_garbage = _Garbage()


def thread_frames() -> dict[int, FrameType]:
    """The innermost frame of each thread, by the thread's identifier.

    Up to Python 3.11 the interpreter makes it under a lock of its own. If it collects garbage for
    that, another thread may come to run, and wait for this lock for ever: nothing is collected
    meanwhile. Source: https://github.com/python/cpython/issues/106883
    """
    if not COLLECTS_AMID:
        return _frames()
    with _garbage:
        return _frames()


def main_frame() -> FrameType | None:
    """That of the main thread; ``None``: it is gone."""
    return thread_frames().get(threading.main_thread().ident or 0)


def _frames() -> dict[int, FrameType]:
    return sys._current_frames()  # noqa: SLF001  made for this
