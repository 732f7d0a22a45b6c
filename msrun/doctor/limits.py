"""Limits of this user, and of the control group: files, processes, locked memory, cores."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from agent.text.wording import sized
from msrun.doctor.finding import Finding, doubtful, fine, unfit
from worker_hooks.machine.cgroup import groups
from worker_hooks.machine.kernel_files import number, text

FEW_FILES, TOO_FEW_FILES = 1024, 128
FEW_PROCESSES, TOO_FEW_PROCESSES = 1024, 64  # threads count, and a rank has dozens
NO_LIMIT = 1 << 60  # bytes; version 1 of control groups shows a number near 2**63 for none


def findings(root: Path = Path("/")) -> Iterator[Finding]:
    """All of them; ``root`` holds ``proc`` and ``sys``."""
    yield counted(
        "open files",
        *resource.getrlimit(resource.RLIMIT_NOFILE),
        (TOO_FEW_FILES, FEW_FILES),
        "ulimit -n 65536",
    )
    yield counted(
        "processes",
        *resource.getrlimit(resource.RLIMIT_NPROC),
        (TOO_FEW_PROCESSES, FEW_PROCESSES),
        "ulimit -u 65536: threads count, too",
    )
    yield fine("locked memory", _shown(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
    yield core(resource.getrlimit(resource.RLIMIT_CORE)[0])
    yield from cgroup(root)


def counted(name: str, soft: int, hard: int, few: tuple[int, int], advice: str) -> Finding:
    """A limit of a number; a child may raise the soft one up to the hard one, and msrun does."""

    def shown(limit: int) -> str:
        return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)

    found = f"{shown(soft)}, at most {shown(hard)}"
    if hard == resource.RLIM_INFINITY or hard >= few[1]:
        return fine(name, found)
    return (unfit if hard < few[0] else doubtful)(name, found, advice)


def core(soft: int) -> Finding:
    """Whether a crash writes a file as large as the rank's memory."""
    if soft == 0:
        return fine("core files", "off")
    found = _shown(soft)
    return doubtful("core files", found, "each rank that crashes may write one: ulimit -c 0")


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else sized(limit)


def cgroup(root: Path) -> Iterator[Finding]:
    """The tightest limits of our control group and of those around it."""
    pids = _lowest(root, "pids", "pids.max", "pids.max")
    if pids is not None and pids < FEW_PROCESSES:
        yield doubtful("cgroup pids", str(pids), "raise it: docker run --pids-limit")
    elif pids is not None:
        yield fine("cgroup pids", str(pids))
    memory = _lowest(root, "memory", "memory.max", "memory.limit_in_bytes")
    if memory is not None and memory < NO_LIMIT:
        yield fine("cgroup memory", sized(memory))
    cores = _cores(root)
    if cores is not None and cores < 1:
        yield doubtful("cgroup cpu", f"{cores:.2g} cores", "raise it: ranks will be throttled")
    elif cores is not None:
        yield fine("cgroup cpu", f"{cores:.3g} cores")


def _lowest(root: Path, controller: str, unified: str, old: str) -> int | None:
    found = []
    for group in groups(root, controller=controller):
        name = unified if group.is_unified else old
        found += [number(level / name) for level in group.levels]
    return min((each for each in found if each is not None), default=None)


def _cores(root: Path) -> float | None:
    found = []
    for group in groups(root, controller="cpu"):
        for level in group.levels:
            words = text(level / "cpu.max").split()
            if len(words) == 2 and words[0].isdecimal():  # noqa: PLR2004
                found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)
