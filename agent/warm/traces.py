"""Leave no trace of our packages in a worker: the user may have an ``agent`` of their own."""

from __future__ import annotations

import sys

OURS = frozenset({"agent", "worker_hooks"})


def vanish(root: str) -> None:
    """Forget our modules, and that they were looked for under ``root``."""
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    for place in list(sys.path_importer_cache):
        if place.startswith(root) and place not in sys.path:
            del sys.path_importer_cache[place]
