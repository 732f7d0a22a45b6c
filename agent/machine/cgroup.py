"""Where the kernel counts the memory of this process's control group.

In a container ``/proc/self/cgroup`` may name the host's path; what is mounted is then the group
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


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


def groups(root: Path = Path("/")) -> Iterator[Cgroup]:
    """Where our group may be, best first (v2, hybrid, v1); ``root`` holds ``proc`` and ``sys``."""
    mounts = root / "sys/fs/cgroup"
    for line in lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        below = PurePosixPath(path.lstrip("/")).parts
        if ".." in below:
            below = ()  # it is outside of the visible tree
        if controllers == "":
            yield Cgroup(mounts, below, is_unified=True)
            yield Cgroup(mounts / "unified", below, is_unified=True)
        elif "memory" in controllers.split(","):
            yield Cgroup(mounts / "memory", below, is_unified=False)


def lines(path: Path) -> list[str]:
    """The lines of a small file; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # not this kind of cgroup, or not readable for us
