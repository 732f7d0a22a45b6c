"""One field of a fault that was asked for, from text to value: numbers, signals, moments."""

from __future__ import annotations

import signal
from typing import Any

from agent.spec.job_spec import UsageError
from worker_hooks.drill.plan import Moment


def whole(name: str, text: Any, low: int) -> int:
    """A whole number.

    Raises:
        UsageError: it is none, or below ``low``.
    """
    if not (isinstance(text, str) and text.isascii() and text.isdigit() and int(text) >= low):
        raise UsageError(f"{name}={text} must be a whole number, at least {low}")
    return int(text)


def positive(name: str, text: Any) -> float:
    """A number above 0.

    Raises:
        UsageError: it is none.
    """
    number = _number(text)
    if not 0 < number < float("inf"):
        raise UsageError(f"{name}={text} must be a number above 0")
    return number


def fraction(name: str, text: Any) -> float:
    """A number from 0 to 1.

    Raises:
        UsageError: it is none.
    """
    number = _number(text)
    if not 0 <= number <= 1:
        raise UsageError(f"{name}={text} must be a number from 0 to 1")
    return number


def signum(deed: str, text: str) -> int:
    """A signal by name or number; ``OOM`` is what the kernel's killer sends.

    Raises:
        UsageError: there is none of that name.
    """
    name = text.upper().removeprefix("SIG")
    if name == "OOM":
        return signal.SIGKILL
    known = signal.Signals.__members__
    if f"SIG{name}" in known:
        return known[f"SIG{name}"]
    if name.isdigit() and int(name) in {member.value for member in signal.Signals}:
        return int(name)
    raise UsageError(f"{deed}: signal={text} is no signal")


def moment(deed: str, text: Any) -> Moment:
    """Where in a step.

    Raises:
        UsageError: no moment is called so.
    """
    if text not in {one.value for one in Moment}:
        named = ", ".join(one.value for one in Moment)
        raise UsageError(f"{deed}: phase={text} is unknown, choose from {named}")
    return Moment(text)


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return -1.0
