"""How msrun prints for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent.text.tone import Tone


@dataclass(frozen=True, slots=True)
class Console:
    """Functions of the command line that print."""

    say: Callable[[str], None]  # one sentence on stderr
    tell: Callable[[str, Tone], None]  # the same, good or bad news
    report: Callable[[str], None]  # the failure report
    progress: Callable[[str], None]  # a line that the next one replaces, on a terminal only
