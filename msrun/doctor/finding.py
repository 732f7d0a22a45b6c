"""What was found about one part of the machine. Pure."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Grade(Enum):
    """How well a part is fit for a job."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """One line of the report."""

    grade: Grade
    part: str
    found: str
    advice: str = ""  # what to do; none if it is fine


def fine(part: str, found: str) -> Finding:
    """Nothing is to be done."""
    return Finding(Grade.OK, part, found)


def doubtful(part: str, found: str, advice: str) -> Finding:
    """It works, but may disappoint."""
    return Finding(Grade.WARN, part, found, advice)


def unfit(part: str, found: str, advice: str) -> Finding:
    """A job will fail because of it."""
    return Finding(Grade.FAIL, part, found, advice)
