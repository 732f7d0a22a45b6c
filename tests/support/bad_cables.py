"""Cables of a cluster's nodes that lose packets, or are slow; `nft` and `tc` do it."""

import shutil

from msrun.cluster.namespaces import PATH
from support.cluster import Cluster

ALL = 100  # percent
SOUND = "table inet fault\ndelete table inet fault\n"
LOSS = """
table inet fault {{
  chain input {{
    type filter hook input priority 0;
    iifname "eth0" {share} drop;
  }}
}}
"""


def lose(cluster: Cluster, node: int, percent: float) -> None:
    """Drop so much of what comes in over the node's cable, at random."""
    share = f"numgen random mod 1000 < {round(percent * 10)}" if percent < ALL else ""
    for rules in (SOUND, LOSS.format(share=share)):
        _filter(cluster, node, rules)


def limit(cluster: Cluster, node: int, rate: str) -> None:
    """Limit what the node sends, to ``100mbit`` for example."""
    _shape(cluster, node, "tbf", "rate", rate, "burst", "64kb", "latency", "50ms")


def mend(cluster: Cluster, node: int) -> None:
    """No loss and no limit."""
    if shutil.which("nft", path=PATH):
        _filter(cluster, node, SOUND)
    _shape(cluster, node, "noqueue")


def _filter(cluster: Cluster, node: int, rules: str) -> None:
    name = cluster.nodes[node].name
    cluster.switch.tool("nsenter", f"--net=/run/netns/{name}", "nft", "-f", "-", said=rules)


def _shape(cluster: Cluster, node: int, *words: str) -> None:
    name = cluster.nodes[node].name
    cluster.switch.tool("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *words)
