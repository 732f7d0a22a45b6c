"""What a worker left behind when it ended: its error file and the end of its log.

This is the only I/O of the failure report. The worker's program wrote everything that is read, so
nothing here trusts it and nothing here raises: what cannot be read is described as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGABRT, SIGKILL
from typing import Any

from agent.failure.device_faults import abort_text, cuda_fault
from agent.failure.log_excerpt import Traceback, find_fatal, find_traceback
from agent.failure.own_end import own_end
from agent.text.log_lines import last_lines, log_lines
from agent.text.sanitize import encodable
from worker_hooks.contract.atomic_file import read_end

LOG_TAIL_BYTES = 64 * 1024
LOG_TAIL_LINES = 20
ERROR_FILE_BYTES = 1024 * 1024
NEAR_LINES = 20
"""How many lines a teardown may print after the traceback of an uncaught exception."""


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How one worker of one attempt ended, as the agent saw it."""

    rank: int
    local_rank: int
    pid: int
    host: str
    exit_code: int | None  # 0..255
    signal: int | None
    at_epoch_s: float  # wall clock
    order: int  # order of detection in this attempt
    stopped_by_us: bool = False
    error_file: Path | None = None
    log: Path | None = None  # where its stderr went
    attempt: int = 0
    hung: str = ""  # why msrun ended it, if it hung
    ended_for: str = ""  # why msrun sent it the signal that ended it; empty: msrun sent none
    amid: str = ""  # where in a step it was when it exited with 0
    told: str = ""  # the argument that msrun appended to its command line, if any

    @property
    def failed(self) -> bool:
        """Whether it failed, for whatever reason."""
        return self.exit_code != 0

    @property
    def exitcode(self) -> int | None:
        """Exit code or signal as torchrun's one number: negative is a signal."""
        return self.exit_code if self.signal is None else -self.signal


@dataclass(frozen=True, slots=True)
class ErrorFile:
    """What a worker wrote to TORCHELASTIC_ERROR_FILE, in either of torch's two forms."""

    message: str
    traceback: str | None = None
    timestamp: int | None = None  # seconds since the epoch
    content: Mapping[str, Any] = field(default_factory=dict)  # as the worker wrote it


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything known about one worker's end."""

    end: WorkerEnd
    error: ErrorFile | None = None
    error_problem: str | None = None  # "unreadable error file ...: why"
    logged: Traceback | None = None  # found in the log
    log_tail: tuple[str, ...] = ()
    oom_kills: int = 0  # by the kernel, in our cgroup, during this attempt
    oom_elsewhere: int = 0  # the same in other cgroups of this machine
    device_fault: str = ""  # how its device failed, as CUDA says

    @property
    def traceback(self) -> str | None:
        """The best traceback that was found, many lines."""
        if self.error is not None and self.error.traceback:
            return self.error.traceback
        return None if self.logged is None else self.logged.text

    @property
    def message(self) -> str | None:
        """The exception as text: its type and message."""
        if self.error is not None and self.error.message:
            return self.error.message
        return None if self.logged is None else self.logged.message


def gather(end: WorkerEnd, oom_kills: int = 0, oom_elsewhere: int = 0) -> Evidence:
    """Read what ``end`` left; never raises.

    Args:
        oom_kills: how far the kernel's counter rose during this attempt.
        oom_elsewhere: how far it rose for other cgroups of this machine.
    """
    error, problem = _error_file(end.error_file)
    lines = _log(end.log)
    logged, tail = pick_traceback(end, lines), last_lines(lines, LOG_TAIL_LINES)
    return Evidence(
        end=end,
        error=error,
        error_problem=problem,
        logged=logged,
        log_tail=tail,
        oom_kills=oom_kills,
        oom_elsewhere=oom_elsewhere,
        device_fault=_device_fault(end, error, logged, lines, tail),
    )


def _device_fault(
    end: WorkerEnd,
    error: ErrorFile | None,
    logged: Traceback | None,
    lines: list[str],
    tail: tuple[str, ...],
) -> str:
    """How its device failed, as its own last words say, in whatever way they ended it."""
    if end.signal == SIGKILL:  # its log is about something else, unless it killed itself
        return cuda_fault(own_end("".join(tail[-1:])))
    traced = None if error is None else find_traceback((error.traceback or "").split("\n"))
    said = [] if error is None else [error.message]
    said += [text for each in (traced, logged) if each for text in (each.message, each.origin)]
    if end.signal == SIGABRT:  # often torch's watchdog, while the main thread waits
        said.append(abort_text(lines))
    return cuda_fault("\n".join(said).strip() or "\n".join(tail))


def pick_traceback(end: WorkerEnd, lines: list[str]) -> Traceback | None:
    """The traceback in the log that belongs to this end, not one logged long before it."""
    python, fatal = find_traceback(lines), find_fatal(lines)
    if python is not None and not _recent(end, python):
        python = None
    # A Python exception often ends in abort(): then the exception tells more than the signal.
    python_first = end.signal in (None, SIGABRT)
    return (python or fatal) if python_first else (fatal or python)


def _recent(end: WorkerEnd, python: Traceback) -> bool:
    uncaught = end.exit_code == 1 and not end.stopped_by_us
    return uncaught or python.lines_after <= NEAR_LINES


def parse_error_file(raw: bytes) -> ErrorFile:
    """Read an error file's bytes.

    Raises:
        ValueError: it is not what torch writes; the text says why.
    """
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    match content:
        case {"message": str(text)}:
            return ErrorFile(encodable(text), None, _seconds(content.get("timestamp")), content)
        case {"message": {"message": _} as message} | {"message": {"extraInfo": _} as message}:
            return _detailed(message, content)
        case _:
            raise ValueError("no message in it")


def _detailed(message: Mapping[str, Any], content: Mapping[str, Any]) -> ErrorFile:
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    traceback, text = extra.get("py_callstack"), message.get("message")
    return ErrorFile(
        message=encodable(text) if isinstance(text, str) else "",
        traceback=encodable(traceback) if isinstance(traceback, str) else None,
        timestamp=_seconds(extra.get("timestamp")),
        content=content,
    )


def _seconds(value: object) -> int | None:
    if not isinstance(value, int | float | str):
        return None
    try:
        return int(value)
    except (ValueError, OverflowError):
        return None  # text, not-a-number, infinity


def _error_file(path: Path | None) -> tuple[ErrorFile | None, str | None]:
    if path is None:
        return None, None
    try:
        raw, before = read_end(path, ERROR_FILE_BYTES)
        if before:
            raise ValueError(f"{before + len(raw)} bytes long")  # noqa: TRY301
        return parse_error_file(raw), None
    except FileNotFoundError:
        return None, None  # only a script with @record writes one
    except OSError as error:
        return None, f"unreadable error file {path}: {error.strerror}"
    except ValueError as error:
        return None, f"unreadable error file {path}: {error}"


def _log(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        raw, before = read_end(path, LOG_TAIL_BYTES)
    except (OSError, ValueError):
        return []  # without a log there is no evidence
    return log_lines(raw, cut=before > 0)
