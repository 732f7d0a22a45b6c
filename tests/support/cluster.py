"""A cluster of namespaces for tests: its programs are marked, and the test fails if one outlives it."""

from __future__ import annotations

import uuid
from pathlib import Path

from msrun.cluster import cluster
from msrun.cluster.namespaces import PATH
from support.jobs import Launcher, marked

__all__ = ["PATH", "Cluster"]


class Cluster(cluster.Cluster):
    """So many nodes, from ``with`` on: node0, node1 ... at 10.77.0.1 and so on."""

    def __init__(self, count: int, folder: Path, mark: str = "", *, as_root: bool = False) -> None:
        self.mark = mark or uuid.uuid4().hex  # in all environments
        self.launcher = Launcher(folder, self.mark)
        super().__init__(count, folder, self.launcher.env(), as_root=as_root)

    def close(self) -> None:
        super().close()
        left = marked(self.mark)
        assert not left, f"processes outlived their cluster: {left}"
