"""Memory, shared memory, clock, and what the shell and the kernel permit."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from agent.text.wording import sized
from msrun.doctor.finding import Finding, doubtful, fine, unfit
from worker_hooks.machine.free_memory import free_bytes
from worker_hooks.machine.kernel_files import table, text

SHM = "/dev/shm"  # noqa: S108  its name in the report
LITTLE_SHM = 256 << 20  # bytes free: DataLoader workers pass their batches in it
FEWEST_RANKS = 2
PER_RANK = 512 << 20  # what torch alone takes, roughly
OLD_CLOCK = 1_700_000_000.0  # November 2023: before msrun was written
_UNSYNCHRONIZED = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 512  # more than its struct has


def findings(root: Path = Path("/")) -> Iterator[Finding]:
    """All of it; ``root`` holds ``proc`` and ``dev``."""
    yield memory(free_bytes(root), _meminfo(root, "MemTotal:"))
    yield shared_memory(str(root / "dev/shm"))
    yield clock(time.time(), is_synchronized())
    yield ptrace(text(root / "proc/sys/kernel/yama/ptrace_scope"))
    yield child_signals(text(root / f"proc/{os.getppid()}/status"))


def _meminfo(root: Path, name: str) -> int | None:
    kib = table(root / "proc/meminfo").get(name)
    return None if kib is None else kib * 1024


def memory(free: int | None, total: int | None) -> Finding:
    """Bytes that can still be allocated, below all limits."""
    if free is None or total is None:
        return doubtful("memory", "the kernel does not say", "look at `free`")
    found = f"{sized(free)} can be used of {sized(total)}"
    if free < FEWEST_RANKS * PER_RANK:
        return doubtful("memory", found, "raise the limit: torch takes 0.3 to 0.5 GB a rank")
    return fine("memory", found)


def shared_memory(place: str) -> Finding:
    """``/dev/shm``: DataLoader workers, NCCL and gloo use it."""
    try:
        room = os.statvfs(place)
    except OSError as error:
        return unfit(SHM, error.strerror or "is missing", "mount a tmpfs there")
    free, size = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    found = f"{sized(free)} free of {sized(size)}"
    if not os.access(place, os.W_OK):
        return unfit(SHM, f"{found}, not writable", "chmod 1777 /dev/shm")
    if free < LITTLE_SHM:
        return doubtful(SHM, found, "enlarge it: docker run --shm-size=8g")
    return fine(SHM, found)


def is_synchronized() -> bool | None:
    """Whether the kernel's clock follows a time server; ``None``: it does not say."""
    libc = ctypes.CDLL(None)
    try:
        state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except AttributeError:
        return None
    return None if state < 0 else bool(state != _UNSYNCHRONIZED)


def clock(now: float, synchronized: bool | None) -> Finding:
    """The time of day; msrun's own timeouts use the monotonic clock."""
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < OLD_CLOCK:
        return unfit("clock", found, "set it: checkpoints and logs carry this time")
    known = {True: "synchronized", False: "not synchronized", None: "synchronization unknown"}
    return fine("clock", f"{found}, {known[synchronized]}")


def ptrace(scope: str) -> Finding:
    """Whether tools such as py-spy may look into ranks; msrun's own stacks do not need it."""
    if scope in {"", "0"}:
        return fine("ptrace", "py-spy and gdb may look into ranks")
    who = "only root may use py-spy or gdb on ranks" if scope in {"1", "2"} else "nobody may"
    return fine("ptrace", f"scope {scope}: {who}; stacks of hanging ranks need neither")


def child_signals(status: str) -> Finding:
    """Whether the shell ignores SIGCHLD, which children inherit."""
    for line in status.splitlines():
        name, _, mask = line.partition(":")
        if name == "SigIgn" and int(mask, 16) >> (signal.SIGCHLD - 1) & 1:
            return doubtful(
                "SIGCHLD",
                "ignored by the calling process",
                "msrun undoes it for itself; programs of the script may wait in vain: trap - CHLD",
            )
    return fine("SIGCHLD", "not ignored")
