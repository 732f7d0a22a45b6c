"""What the sources of a script show before it runs: a training without TrainState loses its steps.

Reads sources, runs nothing. Of a script that uses TrainState nothing is said here: only the running
job shows what holds for it.
"""

from __future__ import annotations

import os

from agent.launch.warm_imports import entry, look, search_path_of, uses_torch_unprotected
from agent.spec.job_spec import JobSpec

HELP = "msrun help protect"


def unprotected(spec: JobSpec) -> str:
    """Why a rank's death costs this job its steps, as one sentence; empty: that is not known."""
    source = entry(spec.program)
    if source is None or "$" in spec.program.name:
        return ""
    search_path = search_path_of(spec.program, source)
    if not uses_torch_unprotected(look(source, search_path), search_path):
        return ""
    follows = "all ranks begin anew" if spec.max_restarts else "the job ends"
    name = os.path.basename(spec.program.name)
    return f"{name} has no TrainState: if a rank dies, {follows}. To protect it: {HELP}"
