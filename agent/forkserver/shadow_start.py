"""Has a worker make shadows of itself, once its script has imported torch."""

from __future__ import annotations

import os
import sys

from agent.forkserver import after_import, unload
from worker_hooks.contract.env import HOOKS, SHADOWS, shadows_socket

TORCH = "torch"


def begin(root: str) -> None:
    """Make shadows, if this worker is to: now, or once torch has been imported.

    ``root``: the folder of our packages, which is not on the script's path.
    """
    every = os.environ.get(SHADOWS, "")
    if not every or os.environ.get(HOOKS) is None:
        return
    steps = int(every) if every.isdecimal() else 0
    name, agent_pid = shadows_socket(os.environ[HOOKS]), os.getppid()

    def install() -> None:
        # a script of TrainState has imported ours by itself; else nothing of ours stays visible
        is_own = any(module.partition(".")[0] in unload.OURS for module in sys.modules)
        sys.path.insert(0, root)
        try:
            from worker_hooks.shadows import cuts, image

            cuts.install(steps, image.Agent(agent_pid, name))
        finally:
            sys.path.remove(root)
        if not is_own:
            unload.unload_ours(root)

    if TORCH in sys.modules:
        install()
    else:
        after_import.call_after_import(TORCH, install)
