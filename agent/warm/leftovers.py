"""Ends what is left of a run whose agent is gone: the last thing a forkserver does."""

from __future__ import annotations

import os
import signal
import time

from worker_hooks.env import RUNS

SWEEPS = 50  # rounds of looking for processes left over, 20 ms apart: one second


def end_leftovers(record_id: str, sessions: frozenset[int]) -> None:
    """Kill every process of this run, wherever it went.

    Args:
        record_id: the run's; in the environment of what its workers started.
        sessions: those the workers lead; their children may have an environment of their own.
    """
    for _ in range(SWEEPS):
        left = [
            pid
            for pid in _pids()
            if pid != os.getpid() and (_session(pid) in sessions or _belongs(pid, record_id))
        ]
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # it ended by itself meanwhile, or became somebody else's
        time.sleep(0.02)  # a killed process that is nobody's child here gives no event


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
        return False  # gone, or somebody else's
