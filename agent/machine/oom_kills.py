"""The kernel's count of processes that it killed because memory ran out.

The counter of the cgroup includes its processes whichever out-of-memory killer killed them, so it
alone decides where it can be read. Other containers raise the machine-wide counter, too, so it is
read only where there is no cgroup counter. Nothing here raises: no counter, no claim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worker_hooks.machine.cgroup import groups
from worker_hooks.machine.kernel_files import table


@dataclass(frozen=True, slots=True)
class OomCounters:
    """A snapshot; ``None`` where the kernel shows no counter."""

    cgroup: int | None = None
    machine: int | None = None

    def kills_since(self, start: OomCounters) -> int:
        """Processes killed for lack of memory between ``start`` and this snapshot; 0 if unknown."""
        if self.cgroup is not None and start.cgroup is not None:
            return max(0, self.cgroup - start.cgroup)
        if self.machine is not None and start.machine is not None:
            return max(0, self.machine - start.machine)
        return 0

    def kills_elsewhere(self, start: OomCounters) -> int:
        """Processes of other cgroups killed so; a rank may be in a group of its own."""
        if self.cgroup is None or start.cgroup is None:
            return 0
        if self.machine is None or start.machine is None:
            return 0
        return max(0, self.machine - start.machine - self.kills_since(start))


def read_counters(root: Path = Path("/")) -> OomCounters:
    """The counters now; ``root`` holds ``proc`` and ``sys``. The kernel counts before it kills."""
    counts = (_oom_kill(path) for path in _cgroup_files(root))
    return OomCounters(
        cgroup=next((count for count in counts if count is not None), None),
        machine=_oom_kill(root / "proc/vmstat"),
    )


def _cgroup_files(root: Path) -> Iterator[Path]:
    """Files that may hold the counter of our cgroup, best first."""
    for group in groups(root):
        ours, *_, top = (*group.levels, group.top)
        name = "memory.events" if group.is_unified else "memory.oom_control"
        yield from (ours / name, top / name)


def _oom_kill(path: Path) -> int | None:
    return table(path).get("oom_kill")
