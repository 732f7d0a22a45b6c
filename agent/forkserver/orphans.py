"""Ends the remaining processes of a run whose agent is gone: a forkserver's last task."""

from __future__ import annotations

import os
import select
import signal
import time

from worker_hooks.contract.env import RUNS
from worker_hooks.contract.process_stat import name_of, read_stat
from worker_hooks.machine.kept_memory import KEEPER

SWEEPS = 50  # rounds of looking for processes left over, 20 ms apart: one second
SAVE_S = 1800.0  # for workers that save without an agent; without progress they exit earlier


def end_orphans(record_id: str, sessions: frozenset[int], spared: frozenset[int]) -> None:
    """Kill every process of this run; workers with a guarded state may save it first.

    Args:
        record_id: of the run; it is in the environment of what its workers started.
        sessions: that the workers lead; their children may have another environment.
        spared: workers that save and exit by themselves; then their children are killed, too, and
            what keeps the memory of dead ones, which they may need.
    """
    saving = {pid for pid in spared if _is_of(pid, record_id, sessions)}
    if saving:
        watched = _open(saving)
        _kill_all(record_id, sessions, _with_families(saving) | _keepers())
        _await_ends(watched, SAVE_S)
    _kill_all(record_id, sessions, set())


def live_sessions() -> frozenset[int]:
    """Every session with a process in it."""
    return frozenset(_session(pid) for pid in _pids())


def _kill_all(record_id: str, sessions: frozenset[int], spared: set[int]) -> None:
    for _ in range(SWEEPS):
        left = [
            pid
            for pid in _pids()
            if pid not in spared and pid != os.getpid() and _is_of(pid, record_id, sessions)
        ]
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # it has ended, or changed its user
        time.sleep(0.02)  # a killed process that is not a child gives no event


def _is_of(pid: int, record_id: str, sessions: frozenset[int]) -> bool:
    return _session(pid) in sessions or _belongs(pid, record_id)


def _with_families(spared: set[int]) -> set[int]:
    """The spared, all processes in their sessions, and all descendants of those."""
    stats = {pid: read_stat(pid) for pid in _pids()}
    parents = {pid: stat.parent for pid, stat in stats.items() if stat is not None}
    sessions = {_session(pid) for pid in spared} - {-1, os.getsid(0)}
    found = {*spared} | {pid for pid in parents if _session(pid) in sessions}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found


def _keepers() -> set[int]:
    """The processes that keep the memory of ranks; of any run."""
    return {pid for pid in _pids() if name_of(pid) == KEEPER}


def _open(pids: set[int]) -> list[int]:
    watched = []
    for pid in pids:
        try:
            watched.append(os.pidfd_open(pid))
        except OSError:
            continue  # it has ended, or no descriptor is left to wait with
    return watched


def _await_ends(watched: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    waiting = select.poll()  # not select(): a descriptor may be above 1023
    for fd in watched:
        waiting.register(fd, select.POLLIN)
    alive = len(watched)
    while alive and (left_s := deadline - time.monotonic()) > 0:
        for fd, _ in waiting.poll(left_s * 1000):
            waiting.unregister(fd)
            alive -= 1
    for fd in watched:
        os.close(fd)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _belongs(pid: int, record_id: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
        mark = f"{RUNS}=".encode()
        runs = [entry[len(mark) :].split(b":") for entry in entries if entry.startswith(mark)]
        return any(record_id.encode() in run for run in runs)
    except OSError:
        return False  # it is gone, or another user's
