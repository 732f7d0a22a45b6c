"""So many nodes in a switch; no root is needed.

A process of the cluster waits for its standard input to end: all is gone when the process that has
made it is, by whatever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from msrun.cluster.node import ClusterNode
from msrun.cluster.switch import Switch


class Cluster:
    """So many nodes, from ``with`` on: node0, node1 ... at 10.77.0.1 and so on."""

    def __init__(
        self, count: int, folder: Path, environ: Mapping[str, str], *, as_root: bool = False
    ) -> None:
        """Nothing is started yet.

        Args:
            folder: for what nodes have for themselves and what programs write; all nodes see it.
            as_root: with this machine's users, for daemons that change theirs.
        """
        self.folder, self._environ, self._as_root = folder, environ, as_root
        self.nodes = [ClusterNode(index, folder, environ) for index in range(count)]
        self.switch: Switch | None = None

    def __enter__(self) -> Self:
        """Turn all on.

        Raises:
            ClusterError: the kernel refuses.
            RuntimeError: a node does not come up.
        """
        hosts = self.folder / "hosts"
        lines = [f"{node.address} {node.name}\n" for node in self.nodes]
        hosts.write_text("".join(["127.0.0.1 localhost\n", "::1 localhost\n", *lines]))
        self.switch = Switch(self.folder, self._environ, hosts, as_root=self._as_root)
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            for node in self.nodes:
                node.connect(self.switch)
                node.start()
            for node in self.nodes:
                node.await_up()
            failed.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes of all nodes; none is left on return."""
        if self.switch is not None:
            self.switch.close()
