"""The controller's node: which nodes have written what of a checkpoint, and let it be fetched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from agent.nodes.run_messages import Donor, DonorFile, PartKept

Donors = Mapping[str, Mapping[int, Donor]]
"""By the digest of a state the nodes that have all of it."""


class KnownDonors:
    """They are known from what nodes say before their ranks' answers."""

    def __init__(self) -> None:
        """None is."""
        self._dump_id = -1
        # digest, in how many parts, node -> by part
        self._parts: dict[tuple[str, int, int], dict[int, PartKept]] = defaultdict(dict)

    def begin(self, dump_id: int) -> None:
        """A dump is made: those of the one before count no more."""
        if dump_id != self._dump_id:
            self._dump_id = dump_id
            self._parts.clear()

    def hear(self, node: int, kept: PartKept) -> None:
        """A node has a file of a state."""
        if kept.dump_id == self._dump_id:
            self._parts[kept.digest, kept.parts, node][kept.part] = kept

    def lose(self, node: int) -> None:
        """A node is lost, or what it had."""
        for about in [about for about in self._parts if about[-1] == node]:
            del self._parts[about]

    def found(self, addresses: Mapping[int, str]) -> Donors:
        """Those of which every part is there.

        ``addresses``: of the nodes that count.
        """
        found: dict[str, dict[int, Donor]] = defaultdict(dict)
        for (digest, count, node), parts in self._parts.items():
            if len(parts) == count and node in addresses:
                files = tuple(
                    DonorFile(each.rank, each.nbytes, each.port, each.key)
                    for _, each in sorted(parts.items())
                )
                found[digest][node] = Donor(0, addresses[node], files)
        return found
