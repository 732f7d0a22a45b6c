"""torchrun's report of a failed job, in its exact layout, because tools parse it. Pure.

Two differences: ranks that msrun itself stopped are not failures and are not listed, and of ranks
that raised the same only the root is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from agent.failure.evidence import Evidence
from agent.failure.root_cause import Cause
from agent.text.sanitize import sanitized
from agent.text.wording import known_signal, ranged

NOT_AVAILABLE = "<N/A>"
NO_TRACEBACK = (
    "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"  # torch's words
)
MAX_WIDTH = 60


def block(cause: Cause, script: str) -> str:
    """The report; it begins with an empty line, as torchrun's does."""
    title = f"{sanitized(script)} FAILED"
    repeats = cause.repeats
    listed = [each for each in cause.failures if each not in repeats]
    entries = {id(each): _entry(index, each) for index, each in enumerate(listed)}
    lines = [title, *(line for entry in entries.values() for line in entry.split("\n"))]
    width = min(MAX_WIDTH, max(map(len, lines)))
    root = entries.pop(id(cause.root))
    return "\n".join(
        (
            "",
            "=" * width,
            title,
            "-" * width,
            "Failures:",
            *(entries.values() or ("  <NO_OTHER_FAILURES>",) * (not repeats)),
            *((f"  {ranged(same)} raised the same",) if (same := _ranks(repeats)) else ()),
            "-" * width,
            "Root Cause (first observed failure):",
            root,
            "=" * width,
        )
    )


def _ranks(failures: Sequence[Evidence]) -> list[int]:
    return [each.end.rank for each in failures]


def local_time(epoch_s: float) -> str:
    """Local time with a resolution of one second, as torchrun writes it."""
    try:
        return datetime.fromtimestamp(int(epoch_s)).isoformat(sep="_")  # noqa: DTZ006
    except (ValueError, OverflowError, OSError):
        return NOT_AVAILABLE  # a number that is no date


def _entry(index: int, evidence: Evidence) -> str:
    end, name = evidence.end, known_signal(evidence.end.signal)
    exitcode = NOT_AVAILABLE if end.exitcode is None else end.exitcode
    return "\n".join(
        (
            f"[{index}]:",
            f"  time      : {local_time(_time(evidence))}",
            f"  host      : {sanitized(end.host)}",
            f"  rank      : {end.rank} (local_rank: {end.local_rank})",
            f"  exitcode  : {exitcode} (pid: {end.pid}) {f' ({name})' if name else ''}",
            f"  error_file: {_error_file(evidence)}",
            f"  traceback : {sanitized(_traceback(evidence))}",
        )
    )


def _time(evidence: Evidence) -> float:
    error = evidence.error
    if error is None or error.timestamp is None:
        return evidence.end.at_epoch_s
    return error.timestamp


def _error_file(evidence: Evidence) -> str:
    there = evidence.error is not None or evidence.error_problem is not None
    return sanitized(str(evidence.end.error_file)) if there else NOT_AVAILABLE


def _traceback(evidence: Evidence) -> str:
    """The error file as torch shows it; without one, the exception from the log."""
    error, end = evidence.error, evidence.end
    if error is not None:
        detailed = isinstance(error.content.get("message"), Mapping)
        text = (error.traceback or error.message or NOT_AVAILABLE) if detailed else error.message
        if text:
            return text.replace("\n", "\n  ") if detailed else text
    if end.signal is not None:
        name = known_signal(end.signal) or NOT_AVAILABLE
        return f"Signal {end.signal} ({name}) received by PID {end.pid}"
    if evidence.logged is not None:
        return evidence.logged.message.replace("\n", "\n  ")
    return NO_TRACEBACK
