"""Reads ``--graceful_signals``: which signals ask for a graceful exit."""

from __future__ import annotations

import signal

from agent.spec.job_spec import UsageError
from msrun.options.settings import Setting

_UNCATCHABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})
_OURS = frozenset({signal.SIGCHLD})  # says that a worker has ended
_FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})


def graceful(setting: Setting) -> tuple[int, ...]:
    """The numbers of the signals that are named.

    Raises:
        UsageError: one is unknown, or cannot ask for anything.
    """
    words = (word.strip() for word in setting.text.split(","))
    return tuple(dict.fromkeys(_number(word, setting.shown) for word in words if word))


def _number(word: str, shown: str) -> int:
    name = word.upper()
    known = signal.Signals.__members__
    found: int | None = known.get(name) or known.get(f"SIG{name}")
    if found is None and word.isascii() and word.isdigit():
        found = int(word) if int(word) in signal.valid_signals() else None
    if found is None:
        raise UsageError(f"{shown}: {word} is no signal of this system, as SIGUSR1 and 10 are")
    if found in _UNCATCHABLE:
        raise UsageError(f"{shown}: no program can catch {word}, so it cannot ask for anything")
    if found in _OURS:
        raise UsageError(f"{shown}: msrun needs {word} for itself: choose another signal")
    if found in _FAULTS:
        raise UsageError(f"{shown}: {word} says that a program is broken: choose another signal")
    return int(found)
