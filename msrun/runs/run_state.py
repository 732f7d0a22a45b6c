"""A recorded run as it is now: its record, its last word (``status.json``), and whether it lives.

A run whose msrun died without an end is *lost*: its last word still says running, and is not
believed.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.controller.states import JobState, RankState
from agent.records.run_record import Record
from agent.spec.job_spec import Timeouts
from worker_hooks.contract.layout import EARLIER, STATUS

LOST = "lost"
ENDS = frozenset(state.value for state in JobState if state.is_end)
ALIVE = frozenset(state.value for state in RankState if state.is_alive)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One rank of the last attempt; times in seconds since the epoch."""

    rank: int
    local_rank: int
    pid: int | None
    state: str
    attempt: int
    started: float | None
    ended: float | None
    exit: str
    log: str
    step: int | None = None  # its newest commit, if its state is guarded
    epoch: int | None = None
    began: int = 0  # the attempt that its process was started in; it lived on since
    step_median_s: float | None = None  # of its last steps
    step_p95_s: float | None = None
    step_own_median_s: float | None = None  # the same without waiting for peers
    is_slow: bool = False  # persistently slower than they are


@dataclass(frozen=True, slots=True)
class LastStatus:
    """What ``status.json`` says; times in seconds since the epoch."""

    host: str
    state: str
    attempt: int
    restarts: int  # of all ranks
    max_restarts: int
    replaced: int  # ranks
    reason: str | None
    started: float
    updated: float
    ended: float | None
    stop_s: float | None  # from asking to stop to giving up; None: no bound
    workers: tuple[WorkerState, ...]
    graceful_s: float = 0.0  # beyond stop_s, for a graceful exit after a signal
    asked_s: float = 0.0  # the same for one that was asked for in another way

    @property
    def counts(self) -> tuple[str, str, str]:
        """The attempt, the restarts and the replaced ranks, as text."""
        restarts = f"{self.restarts} of {self.max_restarts} restarts"
        return f"attempt {self.attempt}", restarts, f"{self.replaced} replaced"

    @property
    def is_guarded(self) -> bool:
        """Whether a rank has told its step: it may stay at one, and leave gracefully."""
        return any(worker.step is not None for worker in self.workers)


@dataclass(frozen=True, slots=True)
class RunState:
    """A run, found by its record."""

    record: Record
    folder: Path  # where its logs are now
    alive: bool
    word: LastStatus | None  # None: there is no readable status.json

    @property
    def elsewhere(self) -> str | None:
        """The other host this run was started on, if the state folder is shared between hosts."""
        host = self.word.host if self.word else ""
        return host if host and not self.alive and host != socket.gethostname() else None

    @property
    def ended(self) -> bool:
        """Whether it came to an end of its own."""
        return self.word is not None and self.word.state in ENDS

    @property
    def lost(self) -> bool:
        """Whether its msrun is gone without having written an end."""
        return not (self.alive or self.ended or self.elsewhere)

    @property
    def state(self) -> str:
        """One word."""
        if self.lost:
            return LOST
        return self.word.state if self.word else JobState.STARTING.value

    @property
    def state_words(self) -> str:
        """The state, with what has to be known to read it right."""
        if self.lost:
            return f"{LOST}: msrun (pid {self.record.pid}) is gone"
        if self.elsewhere and not self.ended:
            return f"{self.state} when last heard of: it runs on host {self.elsewhere}"
        return self.state


def open_process(record: Record) -> int | None:
    """A pidfd of the run's msrun, or ``None`` when that has ended; the caller closes it.

    A zombie has ended. The pid is compared with the birth *after* the pidfd is open, so the pidfd
    can belong to nobody else.
    """
    try:
        fd = os.pidfd_open(record.pid)
    except OSError:
        return None
    if record.is_alive() and not has_ended(fd, 0.0):
        return fd
    os.close(fd)
    return None


def has_ended(process: int, within_s: float) -> bool:
    """Whether the process of this pidfd ends within so many seconds."""
    return bool(select.select([process], [], [], within_s)[0])


def is_alive(record: Record) -> bool:
    """Whether the run's msrun runs."""
    process = open_process(record)
    if process is not None:
        os.close(process)
    return process is not None


def look(record: Record) -> RunState:
    """The run as it is now."""
    alive = is_alive(record)  # before its last word is read: what died before that has said all
    folder = _folder(record)
    return RunState(record, folder, alive, last_status(folder, record.record_id))


def _folder(record: Record) -> Path:
    """A later run with the same ``--log_dir`` has set the files of this one aside."""
    folder = Path(record.log_dir)
    aside = folder / EARLIER / record.record_id
    return aside if os.path.isdir(aside) else folder


def last_status(folder: Path, record_id: str) -> LastStatus | None:
    """What the run's ``status.json`` says; ``None``: unreadable, absent, or another run's."""
    try:
        said = json.loads((folder / STATUS).read_bytes())
        return _last_word(said) if said["record_id"] == record_id else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _last_word(said: Mapping[str, Any]) -> LastStatus:
    default = Timeouts()
    waits = (said.get("grace_s", default.grace_s), said.get("kill_s", default.kill_s))
    return LastStatus(
        host=str(said["host"]),
        state=str(said["state"]),
        attempt=int(said["attempt"]),
        restarts=int(said.get("restarts", 0)),
        max_restarts=int(said["max_restarts"]),
        replaced=int(said.get("replaced", 0)),
        reason=said["reason"] and str(said["reason"]),
        started=float(said["started"]),
        updated=float(said["updated"]),
        ended=_maybe(said["ended"]),
        stop_s=None if None in waits else sum(map(float, waits)),
        workers=tuple(_worker(worker) for worker in said["workers"]),
        graceful_s=_exit_s(said, float(said.get("exit_s", 0.0))),
        asked_s=_exit_s(said, float(said.get("asked_exit_s", 0.0))),
    )


def _exit_s(said: Mapping[str, Any], grace_s: float) -> float:
    """What a graceful exit takes at most beyond the stop: to one step, the dump, and leaving."""
    beyond_s = max(0.0, grace_s - float(said.get("grace_s") or 0.0))
    return grace_s + float(said.get("dump_s", 0.0)) + beyond_s


def _worker(said: Mapping[str, Any]) -> WorkerState:
    return WorkerState(
        rank=int(said["rank"]),
        local_rank=int(said["local_rank"]),
        pid=said["pid"] and int(said["pid"]),
        state=str(said["state"]),
        attempt=int(said["attempt"]),
        started=_maybe(said["started"]),
        ended=_maybe(said["ended"]),
        exit=str(said["exit"]),
        log=str(said["log"]),
        step=_maybe_number(said.get("step")),
        epoch=_maybe_number(said.get("epoch")),
        began=int(said.get("began", said["attempt"])),
        step_median_s=_maybe(said.get("step_median_s")),
        step_p95_s=_maybe(said.get("step_p95_s")),
        step_own_median_s=_maybe(said.get("step_own_median_s")),
        is_slow=bool(said.get("is_slow", False)),
    )


def _maybe(seconds: object) -> float | None:
    return None if seconds is None else float(seconds)  # type: ignore[arg-type]  # TypeError is caught


def _maybe_number(value: object) -> int | None:
    return None if value is None else int(value)  # type: ignore[call-overload]
