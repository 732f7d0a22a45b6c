"""The failure report, for people and for programs. Pure: a cause in, text or JSON out.

People read from the top: which rank died and how, what that usually means, the traceback, where the
log is, what happened to the others. torchrun's block comes last, where its parsers look for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from signal import SIGKILL
from typing import Any

from agent.failure.evidence import Evidence, WorkerEnd
from agent.failure.root_cause import Cause, failed_at
from agent.failure.torchrun_report import block
from agent.text.sanitize import sanitized
from agent.text.wording import describe_exit, known_signal, ranged

HEAD_LINES = 20
TAIL_LINES = 80
MAX_LINE_CHARS = 500


@dataclass(frozen=True, slots=True)
class Report:
    """A failure with all that is reported about it."""

    cause: Cause
    script: str  # as given on the command line
    hint: str | None = None
    ids: Mapping[str, str] = field(default_factory=dict)  # run_id, record_id


def render(report: Report) -> str:
    """The full report as text; safe for a terminal whatever the workers printed."""
    return "\n".join((*_story(report), block(report.cause, report.script)))


def _story(report: Report) -> Iterator[str]:
    root = report.cause.root
    yield headline(root.end)
    if report.hint:
        yield f"  hint: {sanitized(report.hint)}"
    if len(report.cause.failures) > 1 + len(report.cause.repeats):
        yield f"  chosen as root cause: {report.cause.reason}"
    if root.error_problem:
        yield f"  {sanitized(root.error_problem)}"
    yield from _excerpt(root)
    if root.end.log is not None:
        yield f"  log: {sanitized(str(root.end.log))}"
    yield from _aftermath(report.cause)


def headline(end: WorkerEnd) -> str:
    """How one worker ended, as a sentence."""
    who = f"rank {end.rank} on {sanitized(end.host)} (pid {end.pid}, attempt {end.attempt})"
    return f"msrun: {who} {ending(end)}"


def ending(end: WorkerEnd) -> str:
    """``was killed by SIGKILL``, ``exited with code 1``."""
    if end.hung:
        return f"{sanitized(end.hung)}; msrun {'killed' if end.signal == SIGKILL else 'ended'} it"
    if end.exitcode is None:
        return "is gone; how it ended is not known"
    how = describe_exit(end.exitcode)
    return f"{how} {end.amid}, amid training" if end.amid else how


def _excerpt(root: Evidence) -> Iterator[str]:
    """Its traceback; else its message; else the last lines of its log."""
    text = root.traceback or root.message
    if text:
        yield from shortened(sanitized(text).rstrip("\n").split("\n"))
    elif root.log_tail:
        yield "  last lines of its log:"
        yield from (f"  | {_cut(sanitized(line))}" for line in root.log_tail)


def shortened(lines: list[str]) -> list[str]:
    """The beginning and a longer part of the end of a long text, in lines of bounded length."""
    cut = [_cut(line) for line in lines]
    left_out = len(cut) - HEAD_LINES - TAIL_LINES
    if left_out <= 0:
        return cut
    return [*cut[:HEAD_LINES], f"  ... {left_out} lines left out ...", *cut[-TAIL_LINES:]]


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]}..."


def _aftermath(cause: Cause) -> Iterator[str]:
    """One line: what happened to the other ranks."""
    parts = []
    if cause.stopped:
        parts.append(f"msrun stopped {ranged(cause.stopped)}")
    if cause.consequences:
        parts.append(f"{ranged(_of(cause.consequences))} failed in consequence")
    if cause.repeats:
        parts.append(f"{ranged(_of(cause.repeats))} raised the same")
    if others := [each for each in cause.others if each not in cause.repeats]:
        parts.append(f"{ranged(_of(others))} failed as well")
    if parts:
        yield "; ".join(parts)


def _of(failures: Iterable[Evidence]) -> tuple[int, ...]:
    return tuple(evidence.end.rank for evidence in failures)


def as_json(report: Report) -> dict[str, Any]:
    """The report for programs (``failure.json``)."""
    cause = report.cause
    return {
        **report.ids,
        "script": report.script,
        "root": {**_as_json(cause.root), "hint": report.hint, "reason": cause.reason},
        "consequences": [_as_json(each) for each in cause.consequences],
        "other_failures": [_as_json(each) for each in cause.others],
        "stopped_ranks": list(cause.stopped),
    }


def _as_json(evidence: Evidence) -> dict[str, Any]:
    end = evidence.end
    return {
        "rank": end.rank,
        "local_rank": end.local_rank,
        "host": end.host,
        "pid": end.pid,
        "attempt": end.attempt,
        "exit_code": end.exit_code,
        "signal": end.signal,
        "signal_name": known_signal(end.signal),
        "ended_by_msrun": end.hung or end.ended_for or None,
        "time": datetime.fromtimestamp(failed_at(evidence), UTC).isoformat(),
        "message": evidence.message,
        "traceback": evidence.traceback,
        "log": None if end.log is None else str(end.log),
        "log_tail": list(evidence.log_tail),
        "error_file": None if end.error_file is None else str(end.error_file),
        "error_file_problem": evidence.error_problem,
    }


def outer_error(cause: Cause) -> dict[str, Any]:
    """The content of msrun's own TORCHELASTIC_ERROR_FILE: the root's error and exit code.

    As in torchrun, the root's own file is copied and ``message.errorCode`` (negative for a signal)
    is added. Without such a file torchrun writes nothing, msrun fills the form from the log.
    """
    root = cause.root
    if root.error is None:
        return {"message": _built(root) | _error_code(root.end)}
    message = root.error.content.get("message")
    if not isinstance(message, Mapping):
        return dict(root.error.content)
    return {**root.error.content, "message": {**message, **_error_code(root.end)}}


def _built(root: Evidence) -> dict[str, Any]:
    said = headline(root.end).removeprefix("msrun: ")
    return {
        "message": root.message or said,
        "extraInfo": {
            "py_callstack": root.traceback or said,
            "timestamp": str(int(failed_at(root))),
        },
    }


def _error_code(end: WorkerEnd) -> dict[str, int]:
    return {"errorCode": end.exitcode} if end.exitcode else {}
