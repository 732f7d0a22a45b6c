"""The state, memory and processor time of processes, as the kernel reports them."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from worker_hooks.contract.process_stat import SHADOW, children, read_stat

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STOPPED = "T"


class ProcessSample(NamedTuple):
    """One look at a process; times in clock ticks."""

    state: str  # one letter, as in ``ps``
    used: int  # processor time
    born: int  # since boot
    rss_bytes: int


def sample(pid: int) -> ProcessSample | None:
    """A process as it is now; ``None``: it does not exist."""
    found = read_stat(pid)
    if found is None:
        return None
    return ProcessSample(found.state, found.own_ticks, found.born, found.rss_pages * PAGE_BYTES)


class ShadowUse(NamedTuple):
    """The sleeping copies of a job's ranks on this node."""

    processes: int = 0
    nbytes: int = 0  # of memory; what processes share counts in parts


def shadows(agent: int) -> ShadowUse:
    """What the shadows of the msrun with this process id take."""
    found = [_proportional(pid) for pid in children(agent) if _name(pid) == SHADOW]
    return ShadowUse(len(found), sum(found))


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().rstrip("\n")
    except OSError:  # it has ended
        return ""


def _proportional(pid: int) -> int:
    """The process's memory in bytes; of a page of N processes an Nth."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            kib = [int(line.split()[1]) for line in file if line.startswith("Pss:")]
    except OSError:  # it has ended, or the kernel does not tell
        return 0
    return kib[0] * 1024 if kib else 0


class ProcessLoads:
    """The load of processes between two looks, at the first look since their start."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int, float]] = {}  # pid -> born, used, when in ticks

    def percent(self, pid: int, now: ProcessSample) -> float | None:
        """The load in percent of one processor; ``None``: too little time has passed."""
        at = time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_S
        born, used, since = self._last.get(pid, (now.born, 0, float(now.born)))
        if born != now.born:  # another process reuses the pid
            used, since = 0, float(now.born)
        self._last[pid] = (now.born, now.used, at)
        return None if at - since < 1 else 100 * (now.used - used) / (at - since)
