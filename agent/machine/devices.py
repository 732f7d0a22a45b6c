"""Counts this node's devices without torch: for ``--nproc-per-node auto|cpu|gpu|xpu``.

It counts the devices that a worker could see, so the visibility variables of CUDA and HIP apply,
whatever the installed torch was built for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.spec.job_spec import UsageError
from worker_hooks.machine.kernel_files import text

_NVML_OK = 0
_INTEL = "0x8086"
_WORDS = ("auto", "cpu", "gpu", "xpu")


def nvml_count() -> int | None:
    """GPUs that NVIDIA's management library counts; ``None`` without library or driver."""
    import ctypes

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no NVIDIA driver on this machine
        return None
    count = ctypes.c_uint()
    try:
        if nvml.nvmlInit_v2() != _NVML_OK:
            return None
        answer = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlShutdown()
    except AttributeError:  # a stub library without these entry points
        return None
    return count.value if answer == _NVML_OK else None


@dataclass(frozen=True, slots=True)
class DeviceCounts:
    """Where the kernel shows devices; tests point it elsewhere."""

    dev: Path = Path("/dev")
    sys: Path = Path("/sys")
    nvml: Callable[[], int | None] = nvml_count

    def nvidia(self) -> int:
        """NVIDIA GPUs, by the management library or else by their device files."""
        counted = self.nvml()
        if counted is not None:
            return counted
        return sum(1 for path in self.dev.glob("nvidia*") if path.name[6:].isdigit())

    def rocm(self) -> int:
        """AMD GPUs: the nodes of the KFD topology that have compute units (CPUs have none)."""
        nodes = self.sys.glob("class/kfd/kfd/topology/nodes/*/properties")
        return sum(1 for node in nodes if re.search(r"(?m)^simd_count [1-9]", text(node)))

    def xpu(self) -> int:
        """Intel GPUs: render nodes with Intel's PCI vendor."""
        vendors = self.sys.glob("class/drm/renderD*/device/vendor")
        return sum(1 for vendor in vendors if text(vendor) == _INTEL)


def cpu_count() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def gpu_count(environ: Mapping[str, str], machine: DeviceCounts | None = None) -> int:
    """CUDA or ROCm devices a worker could see."""
    machine = machine or DeviceCounts()
    cuda = environ.get("CUDA_VISIBLE_DEVICES")
    if cuda == "":  # an empty list hides every device: no need to ask the driver
        return 0
    nvidia = machine.nvidia()
    if nvidia:
        return visible(cuda, nvidia)
    return visible(environ.get("HIP_VISIBLE_DEVICES", cuda), machine.rocm())


def visible(listed: str | None, present: int) -> int:
    """How many of ``present`` devices a visibility variable leaves visible, by CUDA's rules.

    Reading stops at the first index that does not exist; a device named twice hides all.
    """
    if listed is None or not present:
        return present
    names = []
    for name in (word.strip() for word in listed.split(",")):
        known = int(name) < present if name.isdecimal() else name.startswith(("GPU-", "MIG-"))
        if not known:
            break
        names.append(name)
    return len(names) if len(set(names)) == len(names) else 0


def device_count(word: str, environ: Mapping[str, str], machine: DeviceCounts | None = None) -> int:
    """The number of workers that ``auto``, ``cpu``, ``gpu`` or ``xpu`` means; at least one.

    Raises:
        UsageError: no such device is visible, or the word is unknown.
    """
    machine = machine or DeviceCounts()
    match word:
        case "cpu":
            return cpu_count()
        case "auto":
            return gpu_count(environ, machine) or cpu_count()
        case "gpu":
            count, name = gpu_count(environ, machine), "GPU"
        case "xpu":
            count, name = machine.xpu(), "XPU"
        case _:
            raise UsageError(f"{word!r} is neither a number of workers nor {', '.join(_WORDS)}")
    if not count:
        raise UsageError(f"one worker per {name} was asked for, but no {name} is visible")
    return count
