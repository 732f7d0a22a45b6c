"""What the sources of a script show before it runs: a training without TrainState loses its steps.

Reads sources, runs nothing. Of a script that uses TrainState nothing is said here: only the running
job shows what holds for it.
"""

from __future__ import annotations

import os

from agent.launch.warm_imports import (
    entry,
    is_python_of_ours,
    look,
    search_path_of,
    uses_torch_unprotected,
)
from agent.spec.job_spec import JobSpec, ProgramKind, ProtectMode

HELP = "msrun help protect"


def why_no_shadows(spec: JobSpec) -> str:
    """Why no process of this job can have a shadow; empty: it may."""
    if spec.program.kind is ProgramKind.PROGRAM or not is_python_of_ours(spec):
        return (
            "--protect=shadow needs a Python script in msrun's own interpreter: if a rank dies, "
            f"{_what_follows(spec)}"
        )
    return ""


def _what_follows(spec: JobSpec) -> str:
    return "all ranks begin anew" if spec.max_restarts else "the job ends"


def unprotected(spec: JobSpec) -> str:
    """Why a rank's death costs this job its steps, as one sentence; empty: that is not known."""
    if spec.protect is ProtectMode.OFF:
        return f"--protect=off: if a rank dies, {_what_follows(spec)}"
    no_shadows = why_no_shadows(spec)
    if spec.protect is ProtectMode.SHADOW:
        return no_shadows
    if spec.protect is ProtectMode.AUTO and not no_shadows:  # the running job says what holds
        return ""
    source = entry(spec.program)
    if source is None or "$" in spec.program.name:
        return ""
    search_path = search_path_of(spec.program, source)
    if not uses_torch_unprotected(look(source, search_path), search_path):
        return ""
    name = os.path.basename(spec.program.name)
    return f"{name} has no TrainState: if a rank dies, {_what_follows(spec)}. To protect it: {HELP}"
