"""What a rank's process does, as the kernel sees it, with the processes below it."""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from worker_hooks.contract.process_stat import children, read_stat
from worker_hooks.machine.cgroup import is_frozen

DEPTH = 3  # of processes below a rank's
_IN_KERNEL = "D"
_NEWS = struct.Struct("<sd?")
NEWS_BYTES = _NEWS.size
"""Of what a process's node tells of it."""
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessNews(NamedTuple):
    """A process, as its node tells others of it."""

    state: str  # the kernel's letter
    cpu_s: float  # processor time used so far, by its children too
    is_frozen: bool  # by its control group

    @staticmethod
    def of(pid: int) -> ProcessNews:
        """Of a process of this node."""
        state, cpu_s = process_use(pid)
        return ProcessNews(state, cpu_s, is_frozen(pid))

    def packed(self) -> bytes:
        """As bytes: of thousands of ranks they are heard each second, and hardly ever asked for."""
        return _NEWS.pack(self.state.encode("latin-1"), self.cpu_s, self.is_frozen)

    @staticmethod
    def unpacked(octets: bytes) -> ProcessNews:
        """Of any :data:`NEWS_BYTES` bytes."""
        state, cpu_s, is_frozen = _NEWS.unpack(octets)
        return ProcessNews(state.decode("latin-1"), cpu_s, is_frozen)


def process_use(pid: int) -> tuple[str, float]:
    """The kernel's letter for a process, and the processor seconds it used, with its children.

    One that is gone, or that may not be looked at, is ``X``. One that sleeps while a child waits
    inside the kernel, such as a worker of a data loader, counts as waiting there itself.
    """
    state, used = _stat(pid)
    states, used_below = _below(pid, DEPTH)
    if state == "S" and _IN_KERNEL in states:
        state = _IN_KERNEL
    return state, (used + used_below) / _TICKS


def _stat(pid: int) -> tuple[str, int]:
    found = read_stat(pid)
    return ("X", 0) if found is None else (found.state, found.own_ticks + found.reaped_ticks)


def _below(pid: int, depth: int) -> tuple[str, int]:
    """The states of living children, and what they used: who waits for data workers is not idle."""
    states, used = "", 0
    for child in children(pid):
        found = [_stat(child)] + ([_below(child, depth - 1)] if depth else [])
        states += "".join(state for state, _ in found)
        used += sum(ticks for _, ticks in found)
    return states, used
