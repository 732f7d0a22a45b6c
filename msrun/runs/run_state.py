"""A recorded run as it is now: its record, its last status (``status.json``), whether it is alive.

A run whose msrun died before the job ended is *lost*, whatever its last status says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.controller.protection import Level
from agent.controller.states import JobState, RankState
from agent.records import gathering
from agent.records.run_record import Record
from agent.spec.job_spec import Timeouts
from msrun.runs.cost import Cost, read_cost
from msrun.runs.fields import float_or_none, int_or_none, read_object
from worker_hooks.contract.layout import EARLIER, RunLayout, runs_folder

LOST = "lost"
UNKNOWN = Level.UNKNOWN.value
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
    step: int | None = None  # its newest commit, if it has hooks
    epoch: int | None = None
    began: int = 0  # the attempt in which its process was started
    step_median_s: float | None = None  # of its last steps
    step_p95_s: float | None = None
    step_own_median_s: float | None = None  # the same without waiting for peers
    is_slow: bool = False  # persistently slower than its peers


@dataclass(frozen=True, slots=True)
class LastStatus:
    """The content of ``status.json``; times in seconds since the epoch."""

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
    stop_s: float | None  # from a request to stop to giving up; None: no bound
    workers: tuple[WorkerState, ...]
    graceful_s: float = 0.0  # in addition to stop_s, for a graceful exit after a signal
    asked_s: float = 0.0  # the same after a request of another kind
    protection: str = ""  # what a rank's death costs; empty: not known
    cost: Cost | None = None  # what failures did cost; None: a status of an older version
    is_gathering: bool = False  # its nodes have not met: there is no run yet

    @property
    def counts(self) -> tuple[str, str, str]:
        """The attempt, the restarts and the replaced ranks, as text."""
        restarts = f"{self.restarts} of {self.max_restarts} restarts"
        return f"attempt {self.attempt}", restarts, f"{self.replaced} replaced"

    @property
    def is_guarded(self) -> bool:
        """Whether a rank has hooks and has reported a step: it can exit gracefully."""
        return any(worker.step is not None for worker in self.workers)


@dataclass(frozen=True, slots=True)
class RunState:
    """A run, found by its record."""

    record: Record
    folder: Path  # where its logs are now
    alive: bool
    status: LastStatus | None  # None: there is no readable status.json

    @property
    def elsewhere(self) -> str | None:
        """The host that started this run, if it is another one that shares the state folder."""
        host = self.status.host if self.status else ""
        return host if host and not self.alive and host != socket.gethostname() else None

    @property
    def ended(self) -> bool:
        """Whether its msrun wrote that the job ended."""
        return self.status is not None and self.status.state in ENDS

    @property
    def lost(self) -> bool:
        """Whether its msrun is gone and the job had not ended."""
        return not (self.alive or self.ended or self.elsewhere)

    @property
    def state(self) -> str:
        """One word."""
        if self.lost:
            return LOST
        return self.status.state if self.status else JobState.STARTING.value

    @property
    def state_words(self) -> str:
        """The state, and why it may not be up to date."""
        if self.lost:
            return f"{LOST}: msrun (pid {self.record.pid}) is gone"
        if self.elsewhere and not self.ended:
            return f"{self.state} when it was last seen: it runs on host {self.elsewhere}"
        return self.state


def open_process(record: Record) -> int | None:
    """A pidfd of the run's msrun, which the caller closes; ``None``: the process has ended.

    A zombie has ended. The process's start time is compared *after* the pidfd is open, so the pidfd
    cannot belong to another process that reuses the pid.
    """
    try:
        fd = os.pidfd_open(record.pid)
    except OSError:
        return None
    if record.is_alive() and not has_ended(fd, 0.0):
        return fd
    os.close(fd)
    return None


def has_ended(process: int, within_s: float | None) -> bool:
    """Whether the process of this pidfd ends within so many seconds; ``None``: wait for it."""
    return bool(select.select([process], [], [], within_s)[0])


def is_alive(record: Record) -> bool:
    """Whether the run's msrun is alive."""
    process = open_process(record)
    if process is not None:
        os.close(process)
    return process is not None


def look(record: Record) -> RunState:
    """The run as it is now."""
    alive = is_alive(record)  # read first: the status of an msrun that is dead by now is final
    folder = _folder(record)
    status = last_status(files(record, folder)) or _gathering(record)
    return RunState(record, folder, alive, status)


def _gathering(record: Record) -> LastStatus | None:
    """What is known of a job of several nodes that has not begun; ``None``: nothing."""
    for folder in runs_folder(os.environ, os.getuid()):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            found = _last_status(read_object(folder / record.record_id / gathering.FILE))
            return dataclasses.replace(found, is_gathering=True)
    return None


def files(record: Record, folder: Path) -> RunLayout:
    """The names of its files, which are in this folder now."""
    return RunLayout(folder, record.record_id, record.run_id, node=record.node)


def _folder(record: Record) -> Path:
    """Where its files are: a later run with the same ``--log-dir`` moves them aside."""
    folder = Path(record.log_dir)
    aside = folder / EARLIER / record.record_id
    return aside if os.path.isdir(aside) else folder


def last_status(own: RunLayout) -> LastStatus | None:
    """The run's ``status.json``; ``None``: unreadable, absent, or another run's."""
    try:
        fields = read_object(own.status)
        return _last_status(fields) if fields["record_id"] == own.record_id else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _last_status(fields: Mapping[str, Any]) -> LastStatus:
    default = Timeouts()
    stop_s = (fields.get("grace_s", default.grace_s), fields.get("kill_s", default.kill_s))
    return LastStatus(
        host=str(fields["host"]),
        state=str(fields["state"]),
        attempt=int(fields["attempt"]),
        restarts=int(fields.get("restarts", 0)),
        max_restarts=int(fields["max_restarts"]),
        replaced=int(fields.get("replaced", 0)),
        reason=fields["reason"] and str(fields["reason"]),
        started=float(fields["started"]),
        updated=float(fields["updated"]),
        ended=float_or_none(fields["ended"]),
        stop_s=None if None in stop_s else sum(map(float, stop_s)),
        workers=tuple(_worker(worker) for worker in fields["workers"]),
        graceful_s=_exit_s(fields, float(fields.get("exit_s", 0.0))),
        asked_s=_exit_s(fields, float(fields.get("asked_exit_s", 0.0))),
        protection=_protection(fields),
        cost=read_cost(fields),
    )


def _protection(fields: Mapping[str, Any]) -> str:
    found = fields.get("protection", {})
    level, why = str(found.get("level", UNKNOWN)), str(found.get("why", ""))
    return "" if level == UNKNOWN else f"{level}: {why}"


def _exit_s(fields: Mapping[str, Any], grace_s: float) -> float:
    """What a graceful exit adds to the stop at most: reaching one step, the dump, and exiting."""
    beyond_s = max(0.0, grace_s - float(fields.get("grace_s") or 0.0))
    return grace_s + float(fields.get("dump_s", 0.0)) + beyond_s


def _worker(fields: Mapping[str, Any]) -> WorkerState:
    return WorkerState(
        rank=int(fields["rank"]),
        local_rank=int(fields["local_rank"]),
        pid=fields["pid"] and int(fields["pid"]),
        state=str(fields["state"]),
        attempt=int(fields["attempt"]),
        started=float_or_none(fields["started"]),
        ended=float_or_none(fields["ended"]),
        exit=str(fields["exit"]),
        log=str(fields["log"]),
        step=int_or_none(fields.get("step")),
        epoch=int_or_none(fields.get("epoch")),
        began=int(fields.get("began", fields["attempt"])),
        step_median_s=float_or_none(fields.get("step_median_s")),
        step_p95_s=float_or_none(fields.get("step_p95_s")),
        step_own_median_s=float_or_none(fields.get("step_own_median_s")),
        is_slow=bool(fields.get("is_slow", False)),
    )
