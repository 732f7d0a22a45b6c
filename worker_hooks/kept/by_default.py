"""Where the memory of killed ranks is kept although nobody has asked for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from glob import glob

import torch

COPY_SHARE = 0.005  # of a step's time that copies which cover updates may take
COUNTED_TWICE = "{} may count the memory of each rank twice, as a second process shares it"
ON_DEVICE = "the script may use an accelerator"
_BATCH_SYSTEMS = {  # they add up what the processes of a job take, and may kill it for that
    "SLURM_JOB_ID": "Slurm",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "SGE_TASK_ID": "Grid Engine",
}
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri/renderD*", "/dev/dxg")  # as for glob
_OF_PLUGINS = ("/dev/davinci_manager",)  # of which torch itself does not know


def why_not_by_default(environ: Mapping[str, str]) -> str:
    """Why this process starts no keeper unless it is asked for one; empty: it does."""
    for name, system in _BATCH_SYSTEMS.items():
        if environ.get(name):
            return COUNTED_TWICE.format(system)
    return ON_DEVICE if _may_use_devices() else ""


def _may_use_devices() -> bool:
    """Whether this torch and this machine have an accelerator; nothing of it is started."""
    version = torch.version
    kinds = (version.cuda, version.hip, getattr(version, "xpu", None))
    is_torchs = any(kinds) and any(map(glob, _DEVICES))
    return is_torchs or any(map(os.path.exists, _OF_PLUGINS))
