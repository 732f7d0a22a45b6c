"""Leave no trace of our packages in a worker: the user may have an ``agent`` of their own."""

from __future__ import annotations

import sys

OURS = frozenset({"agent", "worker_hooks"})


def vanish(root: str) -> None:
    """Forget our modules, and that they were looked for under ``root``."""
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    for place in (root, f"{root}/agent", f"{root}/agent/warm", f"{root}/worker_hooks"):
        if place not in sys.path:
            sys.path_importer_cache.pop(place, None)
