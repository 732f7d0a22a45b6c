"""Reads /proc: which processes belong to a trial, their memory, their wake-ups."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
KIB = 1024
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def marked(mark: str) -> list[int]:
    """Find the processes that got ``mark`` in their environment, forks included."""
    needle = mark.encode() + b"\0"
    found = []
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(*GONE):
                if needle in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def kill_marked(mark: str, limit_s: float = 10.0) -> None:
    """Kill them all, repeatedly until none is left (one may just be forking).

    Raises:
        TimeoutError: some outlive SIGKILL.
    """
    deadline = time.monotonic() + limit_s
    while left := marked(mark):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} outlive SIGKILL")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def resident(pid: int) -> int:
    """Resident memory in bytes."""
    return field(PROC / str(pid) / "smaps_rollup", "Rss") * KIB


def proportional(pids: list[int]) -> int:
    """Memory in bytes, each page shared by n processes counted as 1/n (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(*GONE):
            total += field(PROC / str(pid) / "smaps_rollup", "Pss")
    return total * KIB


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity of processes so far, all threads."""

    wakeups: int
    cpu_s: float

    def __sub__(self, earlier: Activity) -> Activity:
        return Activity(self.wakeups - earlier.wakeups, self.cpu_s - earlier.cpu_s)


def activity(pids: list[int]) -> Activity:
    """Voluntary context switches (each is a sleep, and so a wake-up) and CPU time."""
    wakeups = cpu_ns = 0
    for thread in (task for pid in pids for task in PROC.glob(f"{pid}/task/*")):
        with contextlib.suppress(*GONE):
            wakeups += field(thread / "status", "voluntary_ctxt_switches")
            cpu_ns += int((thread / "schedstat").read_text().split()[0])
    return Activity(wakeups, cpu_ns / 1e9)


def field(path: Path, name: str) -> int:
    """Read the number after ``name:``."""
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise ValueError(f"{path} has no {name}")
