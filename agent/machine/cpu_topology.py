"""The CPUs of this machine and how they are connected, read from /sys and /proc.

Only CPUs that are online *and* allowed (a container's or batch system's cpuset) exist for us.
Nothing here raises: without that information (old kernel, sandbox) the machine counts as one node,
one package, one thread per core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from agent.text.ranges import parse_ranges
from worker_hooks.machine.kernel_files import lines, number, text


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: the CPUs (hardware threads) that may be used, and its location."""

    cpus: frozenset[int]
    node: int
    package: int
    complex: int  # cores with one number share their last-level cache

    @property
    def first(self) -> int:
        """Its lowest CPU."""
        return min(self.cpus)


@dataclass(frozen=True, slots=True)
class Topology:
    """Usable cores, ordered by node and then by number; the nodes of the GPUs by index."""

    cores: tuple[Core, ...]
    gpu_nodes: tuple[int, ...] = ()

    @property
    def cpus(self) -> frozenset[int]:
        """Every CPU that a worker may be bound to."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes with a usable CPU, ascending."""
        return tuple(sorted({core.node for core in self.cores}))


def read_topology(
    root: Path = Path("/"),
    allowed: Collection[int] | None = None,
    visible_devices: str | None = None,
) -> Topology:
    """The machine's topology.

    Args:
        root: holds ``sys`` and ``proc``.
        allowed: the CPUs this process may use; ``None`` asks the kernel.
        visible_devices: CUDA_VISIBLE_DEVICES; ``None`` where it is not set (all GPUs).
    """
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    online = _ranges(root / "sys/devices/system/cpu/online")
    cpus = (usable & online) or usable
    nodes = _node_of_cpu(root)
    groups = {
        (_ranges(_cpu(root, cpu) / "topology/thread_siblings_list") | {cpu}) & cpus for cpu in cpus
    }
    cores = (_core(root, group, nodes) for group in groups)
    return Topology(
        cores=tuple(sorted(cores, key=lambda core: (core.node, core.first))),
        gpu_nodes=_gpu_nodes(root, visible_devices),
    )


def _core(root: Path, cpus: frozenset[int], nodes: dict[int, int]) -> Core:
    first = min(cpus)
    package = number(_cpu(root, first) / "topology/physical_package_id")  # or -1, in some machines
    return Core(
        cpus=cpus,
        node=nodes.get(first, 0),
        package=package or 0,
        complex=min(_last_cache(root, first)),
    )


def _cpu(root: Path, cpu: int) -> Path:
    return root / f"sys/devices/system/cpu/cpu{cpu}"


def _last_cache(root: Path, cpu: int) -> frozenset[int]:
    """CPUs that share the highest level of data cache (the L3 where there is one)."""
    caches = {level: index for index in _indexes(root, cpu) if (level := _data_level(index))}
    if not caches:
        return frozenset({cpu})
    return _ranges(caches[max(caches)] / "shared_cpu_list") | {cpu}


def _indexes(root: Path, cpu: int) -> list[Path]:
    return _children(_cpu(root, cpu) / "cache", lambda name: name.startswith("index"))


def _data_level(index: Path) -> int | None:
    return None if text(index / "type") == "Instruction" else number(index / "level")


def _node_of_cpu(root: Path) -> dict[int, int]:
    folders = _children(
        root / "sys/devices/system/node",
        lambda name: name.startswith("node") and name[4:].isdecimal(),
    )
    return {cpu: int(path.name[4:]) for path in folders for cpu in _ranges(path / "cpulist")}


def _gpu_nodes(root: Path, visible: str | None) -> tuple[int, ...]:
    """The NUMA node of each NVIDIA GPU that a worker sees, in the order in which it sees them.

    Numbers count in PCI order. A machine with one node often says -1 for node 0 (as in torch).
    """
    gpus = _children(root / "proc/driver/nvidia/gpus", lambda name: ":" in name)
    if visible is not None:
        gpus = _visible(gpus, visible)
    devices = root / "sys/bus/pci/devices"
    return tuple(number(devices / path.name.lower() / "numa_node") or 0 for path in gpus)


def _visible(gpus: list[Path], listed: str) -> list[Path]:
    """GPUs that CUDA_VISIBLE_DEVICES lists; like CUDA, nothing from the first wrong entry on."""
    seen: list[Path] = []
    for name in map(str.strip, listed.split(",")):
        gpu = _named(gpus, name)
        if gpu is None:
            break
        seen.append(gpu)
    return seen


def _named(gpus: list[Path], name: str) -> Path | None:
    if name.isascii() and name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    fitting = [gpu for gpu in gpus if _uuid(gpu).startswith(name)] if name else []
    return fitting[0] if len(fitting) == 1 else None


def _uuid(gpu: Path) -> str:
    for line in lines(gpu / "information"):
        label, _, value = line.partition(":")
        if label.strip() == "GPU UUID":
            return value.strip()
    return ""


def _children(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if wanted(path.name))
    except OSError:
        return []


def _ranges(path: Path) -> frozenset[int]:
    try:
        return parse_ranges(text(path))
    except ValueError:
        return frozenset()
