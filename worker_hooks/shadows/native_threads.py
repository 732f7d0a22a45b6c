"""Threads that are not Python's: a copy lacks them; a library that waits for its own would hang.

Only those are let through of which it is known what follows: those of gloo are made again with its
groups; pools of OpenBLAS and of torch (pthreadpool) make new threads in a child, as both handle
forks; those of OpenMP have been ended before. Pools name no threads, so these are counted.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping

KNOWN = ("gloo_tcp_loop", "pt_gloo_runloop")
_COUNTS = (
    *("openblas_get_num_threads", "openblas_get_num_threads64_"),
    *("scipy_openblas_get_num_threads", "scipy_openblas_get_num_threads64_"),
)
_ENDING_S, _LOOK_S = 0.1, 0.005  # threads of OpenMP that were told to end

_pools: dict[str, ctypes.CDLL] = {}


def foreign(
    threads: Mapping[int, str], python: Collection[int], main: int, pooled: int
) -> tuple[str, ...]:
    """The names of threads that are not known to be harmless. Pure.

    Args:
        threads: all of the process: their names by their kernel ids.
        python: those of Python.
        main: the main one.
        pooled: at most so many without a name of their own belong to pools.
    """
    unnamed = {threads.get(main, ""), *(threads.get(each, "") for each in python), "python"}
    rest = [
        name
        for number, name in threads.items()
        if number != main and number not in python and name not in KNOWN
    ]
    plain = [name for name in rest if name in unnamed or name.startswith("python")]
    named = [name for name in rest if name not in plain]
    return (*dict.fromkeys(named), *(plain[:1] if len(plain) > pooled else ()))


def why_not() -> str:
    """Why a copy would lack a thread of a library; empty: none that matters."""
    until = time.monotonic() + _ENDING_S
    python = {each.native_id for each in threading.enumerate() if each.native_id}
    while found := foreign(_threads(), python, os.getpid(), _pooled()):
        if time.monotonic() > until:
            return (
                f"a library has threads that a copy of the process would lack: {', '.join(found)}"
            )
        time.sleep(_LOOK_S)
    return ""


def _threads() -> dict[int, str]:
    found = {}
    for number in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{number}/comm") as file:
                found[int(number)] = file.read().rstrip("\n")
        except OSError:  # it has ended
            continue
    return found


def _pooled() -> int:
    """How many threads the pools have that handle forks."""
    pools = 0
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line}
    for path in paths:
        if path not in _pools:
            _pools[path] = ctypes.CDLL(path)
        counts = (getattr(_pools[path], name, None) for name in _COUNTS)
        pools += sum(count() - 1 for count in counts if count is not None)
    return pools + max(int(sys.modules["torch"].get_num_threads()) - 1, 0)
