"""The controller's node: which nodes have what of a checkpoint, and let it be fetched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from agent.nodes.run_messages import Donor, DonorFile, PartKept

Donors = Mapping[str, Sequence[Donor]]
"""By the digest of a state from where all of it can be fetched, in several ways if there are."""

_Parts = dict[tuple[str, int], dict[int, dict[int, PartKept]]]
"""By a state's digest and in how many parts it lies, by part, by node."""


class KnownDonors:
    """They are known from what nodes say before their ranks' answers."""

    def __init__(self) -> None:
        """None is."""
        self._dump_id = -1
        self._parts: _Parts = {}
        self._older: _Parts = {}  # of the dump before

    def begin(self, dump_id: int) -> None:
        """A dump is made. What is known of the one before counts until the next one."""
        if dump_id != self._dump_id:
            self._dump_id = dump_id
            self._parts, self._older = {}, self._parts

    def hear(self, node: int, kept: PartKept) -> None:
        """A node has a file of a state."""
        if kept.dump_id == self._dump_id:
            parts = self._parts.setdefault((kept.digest, max(kept.parts, 1)), {})
            parts.setdefault(kept.part, {})[node] = kept

    def lose(self, node: int) -> None:
        """A node is lost, or what it had."""
        for parts in (*self._parts.values(), *self._older.values()):
            for by_node in parts.values():
                by_node.pop(node, None)

    def found(self, addresses: Mapping[int, str]) -> Donors:
        """Those of which every part is there.

        ``addresses``: of the nodes that count.
        """
        found: dict[str, list[Donor]] = defaultdict(list)
        for (digest, count), parts in (*self._parts.items(), *self._older.items()):
            there = [
                [
                    _file(kept, addresses[node])
                    for node, kept in sorted(parts.get(part, {}).items())
                    if node in addresses
                ]
                for part in range(count)
            ]
            if all(there):
                found[digest] += _ways(there)
        return found


def _ways(there: Sequence[Sequence[DonorFile]]) -> Iterator[Donor]:
    """Each has every part; those who have one alone send it in all of them."""
    for turn in range(max(map(len, there))):
        yield Donor(0, tuple(files[turn % len(files)] for files in there))


def _file(kept: PartKept, host: str) -> DonorFile:
    return DonorFile(kept.rank, kept.nbytes, host, kept.port, kept.key)
