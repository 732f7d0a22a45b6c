"""Where msrun speaks to a person."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Console:
    """How the command line shows things to people."""

    say: Callable[[str], None]  # one sentence on stderr
    report: Callable[[str], None]  # the failure report
    progress: Callable[[str], None]  # a passing word, on a terminal only
