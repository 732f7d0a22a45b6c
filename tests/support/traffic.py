"""What nodes of a test send each other."""

from __future__ import annotations

from pathlib import Path

from support.cluster import Cluster

_RECEIVED, _SENT = 0, 8  # columns


def received(cluster: Cluster, node: int) -> int:
    """Bytes that have come to a node from others."""
    return _bytes(cluster, node, _RECEIVED)


def sent(cluster: Cluster, node: int) -> int:
    """Bytes that a node has sent to others."""
    return _bytes(cluster, node, _SENT)


def _bytes(cluster: Cluster, node: int, column: int) -> int:
    text = Path(f"/proc/{cluster.nodes[node].pid}/net/dev").read_text()
    lines = (line.partition(":") for line in text.splitlines()[2:])
    return sum(int(rest.split()[column]) for name, _, rest in lines if name.strip() != "lo")
