"""Python, torch and the devices that torch sees; torch is imported by a child process only."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from typing import Any

from agent.machine.devices import gpu_count
from msrun.doctor.finding import Finding, doubtful, fine, unfit
from msrun.doctor.probe import Probe, ProbeAnswer
from worker_hooks.contract import env

LIMIT_S = 120.0
OLDEST, NEWEST = (2, 9), (2, 14)  # of torch, tried with msrun
_CODE = """
import json, time
began = time.monotonic()
import torch
import torch.distributed as dist
cuda = torch.cuda.is_available()
found = {
    "version": torch.__version__,
    "seconds": time.monotonic() - began,
    "built_for": torch.version.cuda or getattr(torch.version, "hip", None) or "CPU",
    "has_distributed": dist.is_available(),
    "backends": [
        name for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
        if getattr(dist, f"is_{name}_available", lambda: False)()
    ],
    "devices": [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    if cuda else [],
    "threads": torch.get_num_threads(),
}
print(json.dumps(found))
"""


def interpreter(environ: Mapping[str, str], own: str) -> str:
    """The Python that would run the workers."""
    return environ.get(env.PYTHON_EXEC) or own


def torch_probe(python: str) -> Probe:
    """Begin to import torch."""
    return Probe((python, "-c", _CODE), LIMIT_S)


def python_findings(python: str) -> Iterator[Finding]:
    """The interpreter, and the machine."""
    yield fine("python", f"{platform.python_version()}, workers run {python}")
    machine = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield fine("machine", f"{machine}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores")


def torch_findings(answer: ProbeAnswer, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The version of torch, its backends and devices."""
    if answer.code is None:
        advice = "a driver or a file server hangs: look at nvidia-smi, and where torch is installed"
        yield unfit("torch", f"its import has not ended within {LIMIT_S:.0f} s", advice)
        return
    facts = _facts(answer)
    if facts is None:
        last = answer.err.strip().splitlines()[-1:] or [f"exit code {answer.code}"]
        yield unfit("torch", f"cannot be imported: {last[0]}", "install torch for that interpreter")
        return
    said = (
        f"{facts['version']}, built for {facts['built_for']}, imported in {facts['seconds']:.1f} s"
    )
    found = re.match(r"(\d+)\.(\d+)", facts["version"])
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if OLDEST <= version <= NEWEST:
        yield fine("torch", said)
    else:
        tried = " to ".join(".".join(map(str, each)) for each in (OLDEST, NEWEST))
        yield doubtful("torch", said, f"msrun was tried with {tried}: run `msrun drill` first")
    backends = facts["backends"]
    if backends:
        yield fine("backends", ", ".join(backends))
    else:
        yield unfit("backends", "none", "install a torch that was built with torch.distributed")
    yield _devices(facts, gpu_count(environ))


def _facts(answer: ProbeAnswer) -> dict[str, Any] | None:
    try:
        found = json.loads(answer.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) and answer.code == 0 else None


def _devices(facts: Mapping[str, Any], visible: int) -> Finding:
    names = facts["devices"]
    if names:
        alike = dict.fromkeys(names)
        said = ", ".join(f"{names.count(name)} x {name}" for name in alike)
        return doubtful("devices", said, "msrun was never run on a GPU: run `msrun drill` first")
    if visible:
        advice = f"this torch (for {facts['built_for']}) does not see them: install a CUDA build"
        return doubtful("devices", f"{visible} GPUs, and torch sees none", advice)
    return fine("devices", "no GPU: ranks train on the CPU")
