"""What the kernel says of a process or a thread in ``/proc``: the only parser of ``stat``."""

from __future__ import annotations

from typing import NamedTuple

SHADOW = "msrun-shadow"
"""The name of a process that is a sleeping copy of a rank."""

_EXITING = 0x4  # PF_EXITING of linux/sched.h


class ProcessStat(NamedTuple):
    """One look at a process or thread, as proc(5) describes it; times in clock ticks."""

    state: str  # one letter, as in ``ps``
    parent: int
    flags: int
    own_ticks: int  # of processor time
    reaped_ticks: int  # of processor time that its dead children had
    born: int  # since boot; tells a reused pid
    rss_pages: int

    @property
    def is_dead(self) -> bool:
        """Whether nothing is left of it but an entry for its parent."""
        return self.state in {"Z", "X"}

    @property
    def is_stopped(self) -> bool:
        """Whether none of it runs before a signal or a debugger lets it."""
        return self.state in {"T", "t"}

    @property
    def is_exiting(self) -> bool:
        """Whether the kernel takes it apart: its descriptors close before it is dead."""
        return bool(self.flags & _EXITING)


def read_stat(pid: int | str = "self", thread: int | str = "") -> ProcessStat | None:
    """A process, or one of its threads; ``None`` when there is none that may be looked at."""
    path = f"/proc/{pid}/task/{thread}/stat" if thread else f"/proc/{pid}/stat"
    try:
        with open(path, "rb") as file:
            # the name in parentheses may hold anything; state is the first field behind it
            fields = file.read().rpartition(b")")[2].split()
        own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
        return ProcessStat(
            state=fields[0].decode(),
            parent=int(fields[1]),
            flags=int(fields[6]),
            own_ticks=own,
            reaped_ticks=reaped,
            born=int(fields[19]),
            rss_pages=int(fields[21]),
        )
    except (OSError, ValueError, IndexError):
        return None


def name_of(pid: int) -> str:
    """Its name, as ps shows it; empty: there is none that may be looked at."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().rstrip(b"\n").decode(errors="replace")
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """The children of a process's main thread; none when it cannot be looked at."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except (OSError, ValueError):
        return []
