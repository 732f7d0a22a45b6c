"""What a forkserver imports for its workers, and whether a fork of it is like a fresh process."""

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

    A fresh interpreter finds that file first; here Python's own is loaded already.

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

    Returns why this process must not be forked, else nothing: a module that fails half-way leaves
    others behind, and would fail differently when the script imports it again.
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

    Without the collector: nothing is garbage yet, it would only walk what grows.
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
    """How many threads this process has, C's too."""
    return len(os.listdir("/proc/self/task"))


def why_not_fork() -> str:
    """Why a fork of this process would not be like a fresh one; empty if it would be.

    OpenBLAS (numpy) keeps idle threads, ends them before a fork and makes them anew, so a fork
    that does nothing comes first. Any other thread may hold a lock that no fork would release.
    """
    if threads() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if threads() > 1:
            return f"a preloaded module started {threads() - 1} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module initialised CUDA"
    return ""
