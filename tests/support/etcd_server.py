"""Debian's etcd on a node of a cluster, and nodes of which one does not hear the other."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

from msrun.cluster.namespaces import PATH
from msrun.cluster.node import ClusterNode
from msrun.cluster.program import NodeProgram
from support.cluster import Cluster
from support.jobs import DEADLINE_S, poll

PORT = 2379
NOBODY = "02:00:00:00:00:fe"  # a hardware address that no node has


def missing() -> str:
    """Why it cannot be had here, in a sentence, or nothing."""
    absent = [name for name in ("etcd", "etcdctl") if shutil.which(name, path=PATH) is None]
    return f"{' and '.join(absent)} would have to be installed" if absent else ""


@dataclass
class EtcdServer:
    """An etcd on one node, of which the state is on that node's disk."""

    node: ClusterNode
    program: NodeProgram | None = None

    @property
    def url(self) -> str:
        return f"etcd://{self.node.address}:{PORT}"

    def start(self) -> None:
        here = f"http://{self.node.address}"
        peers = f"{here}:2380"
        words = [
            shutil.which("etcd", path=PATH),
            f"--data-dir={self.node.folder}/etcd",
            f"--listen-client-urls={here}:{PORT}",
            f"--advertise-client-urls={here}:{PORT}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        ]
        environ = {"PATH": PATH, "ETCD_UNSUPPORTED_ARCH": os.uname().machine}
        self.program = self.node.run(words, environ)
        poll(self.is_up)

    def is_up(self) -> bool:
        return self._ctl("endpoint", "health")[0] == 0

    def kill(self) -> None:
        """Its process is gone; what it knows stays on the disk."""
        assert self.program is not None
        self.program.signal(9)
        self.program.wait(DEADLINE_S)

    def keys(self) -> dict[str, str]:
        """All that it holds."""
        lines = self._ctl("get", "--prefix", "/msrun/")[1].splitlines()
        return dict(zip(lines[::2], lines[1::2], strict=True))

    def _ctl(self, *words: str) -> tuple[int, str]:
        ctl = [shutil.which("etcdctl", path=PATH), f"--endpoints={self.node.address}:{PORT}"]
        done = self.node.run([*ctl, *words], {"PATH": PATH, "ETCDCTL_API": "3"})
        return done.wait(DEADLINE_S), done.output()


def part(cluster: Cluster, one: int, other: int) -> None:
    """Neither hears the other any more; both hear all others."""
    for node, lost in ((one, other), (other, one)):
        words = ("lladdr", NOBODY, "nud", "permanent")
        _neighbour(cluster, node, "replace", cluster.nodes[lost].address, *words)


def mend(cluster: Cluster, one: int, other: int) -> None:
    """They hear each other again."""
    for node, lost in ((one, other), (other, one)):
        _neighbour(cluster, node, "del", cluster.nodes[lost].address)


def _neighbour(cluster: Cluster, node: int, verb: str, address: str, *words: str) -> None:
    assert cluster.switch is not None
    name = cluster.nodes[node].name
    cluster.switch.tool("ip", "-n", name, "neigh", verb, address, *words, "dev", "eth0")


def etcd_on(cluster: Cluster, node: int) -> EtcdServer:
    """An etcd that answers."""
    server = EtcdServer(cluster.nodes[node])
    server.start()
    return server
