"""A fast exit for a warm worker: it skips the teardown of what the fork shared.

The teardown of torch costs 0.1-0.2 s of CPU a worker, nearly all of it for copying pages that the
fork shared, only to discard them. Every visible effect stays: threads are joined, ``atexit`` runs,
``__main__`` and every module the script imported are torn down (an open file is flushed), process
groups are destroyed, C's stdio is flushed, later C exit functions run. Left out are the
dictionaries of modules that were preloaded, the operators they registered with torch, and the C++
static destructors of their libraries.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from typing import Any

from worker_hooks.contract.process_stat import read_stat

# Their module state holds process groups, whose end other ranks can see.
TORN_DOWN = "torch.distributed"
PATIENCE_S = 0.05  # for threads of libraries

_kept: dict[str, object] = {}


def prepare() -> None:
    """Register before anything else is imported: exit functions run last-in, first-out."""
    atexit.register(_forget)


def keep_registrations() -> None:
    """Before the first fork: skip torch's deregistration of operators at exit.

    ``torch.library`` has a finalizer for each of its libraries, 60 ms in all, to clean a table that
    ends with the process.
    """
    library = sys.modules.get("torch.library")
    registry: dict[Any, object] = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(registry):
        alive = finalizer.peek()
        if library is not None and alive and alive[1] is getattr(library, "_del_library", None):
            finalizer.atexit = False


def arm(preloaded: set[str]) -> None:
    """In a worker: keep what was preloaded, and end the process once Python is finished."""
    _kept.update({name: sys.modules[name] for name in preloaded if not name.startswith(TORN_DOWN)})
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))
    libc = ctypes.CDLL(None)
    # Last-in, first-out: flush C's streams, then end with the very status exit() was given.
    libc.on_exit(libc._exit, None)  # noqa: SLF001  C's name for it
    libc.on_exit(libc.fcloseall, None)


def _let_threads_finish() -> None:
    """Wait, for a moment, until no other thread is running.

    A process group's thread that wants the GIL for its last tensor while the interpreter ends
    aborts the process (torch 2.13: pytorch PR 179291); this exit is fast enough to hit that. No
    event tells when such a thread is finished; a sleeping one is harmless.
    """
    deadline = time.monotonic() + PATIENCE_S
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.001)  # a thread that waits for the GIL gets it now
        if not _is_another_running():
            return


def _is_another_running() -> bool:
    for thread in os.listdir("/proc/self/task"):
        found = read_stat("self", thread)  # None: it ended
        if found is not None and found.state == "R" and int(thread) != os.getpid():
            return True
    return False


def _forget() -> None:
    """Hide preloaded modules from the interpreter's teardown, as it does itself: set None."""
    if threading.main_thread().is_alive():
        return  # the exit functions were run early
    _let_threads_finish()
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]  # None is allowed here
    for name, module in _kept.items():
        if modules.get(name) is module:
            modules[name] = None
