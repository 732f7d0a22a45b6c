"""How much memory can be allocated here before the kernel's out-of-memory killer acts.

The limits of the control group, of the groups around it and of the machine all count.
Nothing here raises: a limit that the kernel does not show is no limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from worker_hooks.machine.cgroup import groups
from worker_hooks.machine.kernel_files import number, table

_KIB = 1024


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes below the tightest limit; ``None``: none is known. ``root`` has ``proc``, ``sys``."""
    found = [_available(root)]
    for group in groups(root):
        of = _unified if group.is_unified else _old
        found += map(of, group.levels)
    return min((nbytes for nbytes in found if nbytes is not None), default=None)


def _available(root: Path) -> int | None:
    """What the kernel estimates to be available on the machine without swapping."""
    kib = table(root / "proc/meminfo").get("MemAvailable:")
    return None if kib is None else kib * _KIB


def _unified(level: Path) -> int | None:
    limits = [number(level / "memory.max"), number(level / "memory.high")]
    used, stat = number(level / "memory.current"), table(level / "memory.stat")
    return free_in_group(limits, used, stat.get("inactive_file", 0), stat.get("active_file", 0))


def _old(level: Path) -> int | None:
    limits = [number(level / "memory.limit_in_bytes")]
    used, stat = number(level / "memory.usage_in_bytes"), table(level / "memory.stat")
    idle, busy = (stat.get(f"total_{kind}_file", 0) for kind in ("inactive", "active"))
    return free_in_group(limits, used, idle, busy)


def free_in_group(
    limits: Iterable[int | None], used: int | None, idle: int, busy: int
) -> int | None:
    """Bytes that a control group can still allocate; ``None``: it has no limit.

    Args:
        limits: in bytes; the lowest counts.
        used: bytes.
        idle: bytes of cached files among those, not read for long: the kernel drops all of them.
        busy: bytes of cached files among those, in use: the kernel may drop half of them.
    """
    known = [limit for limit in limits if limit is not None]
    if not known or used is None:
        return None
    return max(0, min(known) - max(0, used - idle - busy // 2))
