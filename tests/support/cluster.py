"""A cluster of namespaces for tests: its programs are marked, and the test fails if one outlives it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

from msrun.cluster import cluster
from msrun.cluster.namespaces import PATH
from msrun.cluster.node import ClusterNode
from msrun.cluster.program import NodeProgram
from support.jobs import PYTHON, Launcher, marked
from support.warm_python import WarmPython, client_environ

__all__ = ["PATH", "Cluster"]


class Cluster(cluster.Cluster):
    """So many nodes, from ``with`` on: node0, node1 ... at 10.77.0.1 and so on."""

    def __init__(self, count: int, folder: Path, mark: str = "", *, as_root: bool = False) -> None:
        self.mark = mark or uuid.uuid4().hex  # in all environments
        self.launcher = Launcher(folder, self.mark)
        self.warm: WarmPython | None = None  # in which msruns begin
        super().__init__(count, folder, self.launcher.env(), as_root=as_root)

    def run_msrun(
        self, node: ClusterNode, words: list[object], env: Mapping[str, str], cwd: Path
    ) -> NodeProgram:
        """Start `msrun WORDS` on a node, in a Python that has imported torch if there is one."""
        argv = ["-m", "msrun", *map(str, words)]
        if self.warm is None:
            return node.run([*PYTHON, *argv], env=env, cwd=cwd)
        assert self.switch
        begins, environ = (*self.warm.words, *argv), {**node.environ(), **env}
        return self.switch.start(
            lambda told: (begins, client_environ(environ, told, node.pid)), cwd
        )

    def close(self) -> None:
        super().close()
        left = marked(self.mark)
        assert not left, f"processes outlived their cluster: {left}"
