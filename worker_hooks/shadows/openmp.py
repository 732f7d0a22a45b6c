"""Threads of OpenMP end before a fork: a child would wait for ever for threads that it lacks.

``omp_pause_resource_all`` (OpenMP 5.0) ends the pool; the next parallel region makes another one,
in the parent and in the child. libgomp, which torch's wheels bring along, has it.
"""

from __future__ import annotations

import ctypes
import os

_HARD = 2  # omp_pause_hard of omp.h: the threads end
_PAUSE = "omp_pause_resource_all"
_NAMES = ("libgomp", "libiomp5", "libomp")

_known: dict[str, ctypes.CDLL] = {}


def _libraries() -> list[str]:
    with open("/proc/self/maps") as maps:
        paths = {
            line.split(maxsplit=5)[5].strip() for line in maps if "omp" in line and "/" in line
        }
    return sorted(path for path in paths if os.path.basename(path).startswith(_NAMES))


def why_not() -> str:
    """Why a pool cannot be ended; empty: all can."""
    for path in _libraries():
        if path not in _known:
            _known[path] = ctypes.CDLL(path)
        if not hasattr(_known[path], _PAUSE):
            return f"{os.path.basename(path)} cannot end its threads before a fork"
    return ""


def pause() -> bool:
    """End the pools; whether that worked. Only where :func:`why_not` found nothing."""
    return all(not getattr(library, _PAUSE)(_HARD) for library in _known.values())
