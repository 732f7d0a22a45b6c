"""Control groups: where the kernel counts our memory, and whether a process is frozen by one.

In a container ``/proc/self/cgroup`` may name the host's path; what is mounted is then the group
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from worker_hooks.machine.kernel_files import lines


class Cgroup(NamedTuple):
    """The place of this process in a tree of groups; its folders may not exist."""

    top: Path
    below: tuple[str, ...]  # the path from the top to our group
    is_unified: bool  # version 2 of the kernel's interface

    @property
    def levels(self) -> Iterator[Path]:
        """Our group's folder, then the groups' around it, up to the top."""
        for depth in range(len(self.below), -1, -1):
            yield self.top.joinpath(*self.below[:depth])


def groups(
    root: Path = Path("/"), *, pid: int | str = "self", controller: str = "memory"
) -> Iterator[Cgroup]:
    """Where a group may be, best first (v2, hybrid, v1); ``root`` holds ``proc`` and ``sys``."""
    mounts = root / "sys/fs/cgroup"
    for line in lines(root / f"proc/{pid}/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        below = PurePosixPath(path.lstrip("/")).parts
        if ".." in below:
            below = ()  # it is outside of the visible tree
        if controllers == "":
            yield Cgroup(mounts, below, is_unified=True)
            yield Cgroup(mounts / "unified", below, is_unified=True)
        elif controller in controllers.split(","):
            yield Cgroup(mounts / controller, below, is_unified=False)


def is_frozen(pid: int, root: Path = Path("/")) -> bool:
    """Whether a control group keeps this process from running (``docker pause``, a batch system).

    Such a process looks asleep (v2), or as if it waited inside the kernel (v1).
    """
    for group in groups(root, pid=pid, controller="freezer"):
        ours, *_, top = (*group.levels, group.top)
        name = "cgroup.events" if group.is_unified else "freezer.state"
        for folder in (ours, top):
            if found := lines(folder / name):
                if "frozen 1" in found or found[0] in {"FROZEN", "FREEZING"}:
                    return True
                break  # the top of a container is read only where our own folder is not there
    return False
