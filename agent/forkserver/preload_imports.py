"""Imports modules for the workers, and checks that a fork will be like a fresh process."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from agent.forkserver.unload import OURS


def hidden(search_path: str | None, before: set[str]) -> str:
    """Why our imports hide the user's: a file beside the script may shadow a module of Python.

    A fresh interpreter would find that file first; here Python's own module is already loaded.
    ``before``: names of modules that were loaded before ours.
    """
    for name in sys.modules.keys() - before:
        place = os.path.join(search_path or "", name)
        if name.split(".")[0] in OURS or "." in name:
            continue
        if os.path.isfile(f"{place}.py") or os.path.isfile(f"{place}/__init__.py"):
            return f"{place} hides Python's own {name}"
    return ""


def load(modules: tuple[str, ...], search_path: str | None) -> str:
    """Import what the script will import, found as the script would find it.

    Returns:
        Why this process must not be forked; empty if it may be. A module that fails half-way leaves
        others loaded, and would fail differently when the script imports it again.
    """
    with found_from(search_path):
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001  the user's modules may raise anything
                # `from torch import no_grad` looks like a module to a parser
                absent = error.name if isinstance(error, ModuleNotFoundError) else None
                guessed = module.startswith("torch.") and absent != "torch"
                if not guessed or absent is None or not f"{module}.".startswith(f"{absent}."):
                    return f"importing {module} failed: {error!r}"
    return ""


@contextlib.contextmanager
def found_from(search_path: str | None) -> Iterator[None]:
    """Import as the script will: its folder leads ``sys.path``.

    The garbage collector is off: there is no garbage yet, it would only cost time.
    """
    if search_path is not None:
        sys.path.insert(0, search_path)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if search_path is not None and sys.path and sys.path[0] == search_path:
            del sys.path[0]


def threads() -> int:
    """How many threads this process has, including those of C libraries."""
    return len(os.listdir("/proc/self/task"))


def why_not_fork() -> str:
    """Why a fork of this process would not be like a fresh one; empty if it would be.

    OpenBLAS (numpy) keeps idle threads and ends them before a fork, so an empty fork comes first.
    Any other thread may hold a lock that would never be released in a fork.
    """
    devices = _device_modules()
    if threads() > 1 or devices:
        is_bad = _in_fork(lambda: any(each._is_in_bad_fork() for each in devices))  # noqa: SLF001
        if threads() > 1:
            return f"a preloaded module started {threads() - 1} threads"
        if is_bad:
            return "a preloaded module asked the driver of the accelerators, so no fork can use it"
    return ""


def _device_modules() -> list[Any]:
    """Of a torch that was built for accelerators: what knows whether their driver was called.

    It was if a module asked for the number of devices, long before ``is_initialized()``.
    """
    torch = sys.modules.get("torch")
    built_for = ("cuda", "hip", "xpu")
    if torch is None or not any(getattr(torch.version, kind, None) for kind in built_for):
        return []
    known = (getattr(torch, kind, None) for kind in ("cuda", "xpu"))
    return [each for each in known if hasattr(each, "_is_in_bad_fork")]


def _in_fork(ask: Callable[[], bool]) -> bool:
    """What an empty fork of this process answers; true, if it gives no answer."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(Exception):
            code = int(ask())
        os._exit(code)
    with contextlib.suppress(ChildProcessError):  # a module made SIGCHLD ignored
        return os.waitpid(pid, 0)[1] != 0
    return False
