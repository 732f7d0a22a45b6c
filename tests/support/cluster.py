"""A cluster of namespaces for tests: its programs are marked, and the test fails if one outlives it."""

from __future__ import annotations

import os
import subprocess
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
        number = len(self.switch.programs)
        out, err = (self.switch.folder / f"{number}.{end}" for end in ("out", "err"))
        reads, writes = os.pipe()
        with open(reads) as told, open(out, "ab") as to_out, open(err, "ab") as to_err:
            try:
                process = subprocess.Popen(
                    [*self.warm.words, *argv],
                    env=client_environ({**node.environ(), **env}, writes, node.pid),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=to_out,
                    stderr=to_err,
                    pass_fds=(writes,),
                    start_new_session=True,
                )
            finally:
                os.close(writes)
            program = NodeProgram(process, int(told.read()), out, err)
        self.switch.programs.append(program)
        return program

    def close(self) -> None:
        super().close()
        left = marked(self.mark)
        assert not left, f"processes outlived their cluster: {left}"
