"""Removes our packages from a worker: the user may have a package ``agent`` of their own."""

from __future__ import annotations

import sys
from collections.abc import Collection

OURS = frozenset({"agent", "worker_hooks"})


def unload_ours(root: str, preloaded: Collection[str] = ()) -> None:
    """Unload our modules, and drop the cached lookups under ``root``.

    ``preloaded``: modules that the script imports itself; they stay loaded.
    """
    kept = {name.split(".")[0] for name in preloaded}
    for name in [name for name in sys.modules if name.split(".")[0] in OURS - kept]:
        del sys.modules[name]
    folders = tuple(f"{root}/{package}" for package in OURS)
    for place in list(sys.path_importer_cache):
        if (place == root or place.startswith(folders)) and place not in sys.path:
            del sys.path_importer_cache[place]
