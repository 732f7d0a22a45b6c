"""Imports modules for the workers, and checks that a fork will be like a fresh process."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator

from agent.forkserver.unload import OURS


def hidden(search_path: str | None, before: set[str]) -> str:
    """Why our imports hide the user's: a file beside the script may shadow a module of Python.

    A fresh interpreter would find that file first; here Python's own module is already loaded.

    Args:
        search_path: the script's folder.
        before: names of modules that were loaded before ours.
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
    if threads() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):  # a module made SIGCHLD ignored
            os.waitpid(pid, 0)
        if threads() > 1:
            return f"a preloaded module started {threads() - 1} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module initialised CUDA"
    return ""
