"""Files in the memory of a node's agent, to which its ranks copy their state, in numbered sets.

A set has files for every rank of the node, and holds one copy. A rank looks for them by their
descriptors as long as it has an order. So a set is closed no sooner than another copy is ordered:
by then all ranks that are alive have answered to something later.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from worker_hooks.contract import protocol
from worker_hooks.contract.layout import held
from worker_hooks.storage.manifest import PRIVATE, Shard


class RankFiles(NamedTuple):
    """What one rank writes to: descriptors."""

    state: int
    private: int


class CopyFiles:
    """The sets of one node; it knows none before the first order."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """``ranks``: of this node."""
        self._ranks = tuple(ranks)
        self._sets: dict[int, dict[int, RankFiles]] = {}

    def placed(self, rank: int, order: protocol.Copy) -> protocol.Copy:
        """The order with the paths of the rank's files.

        Every set is closed but that of the order, which is made if it is not there, and that of the
        newest copy.

        Raises:
            OSError: no descriptor is left.
        """
        if order.files not in self._sets:  # before others are closed, whose numbers are known
            self._sets[order.files] = self._opened()
        for number in self._sets.keys() - {order.files, order.newest}:
            _close(self._sets.pop(number))
        state, private = map(held, self._sets[order.files][rank])
        return order._replace(state=state, private=private)

    def why_unsound(self, answer: protocol.Copied) -> str:
        """Why a rank cannot have written what it says; empty: it may have."""
        files = self._sets.get(answer.files, {}).get(answer.rank)
        if answer.why_not or files is None:
            return ""
        for fd, nbytes in ((files.state, answer.nbytes), (files.private, answer.private_nbytes)):
            if nbytes < 0 or os.fstat(fd).st_size != nbytes:
                return f"it copied {os.fstat(fd).st_size} bytes and says {nbytes}"
        return ""

    def found(self, number: int, shards: Iterable[Shard]) -> tuple[Shard, ...]:
        """These shards of a copy with the descriptors of their files.

        Raises:
            KeyError: there is no such set, or it has no files of such a rank.
        """
        files = self._sets.get(number, {})  # a controller without ranks has none
        return tuple(one._replace(file=str(files[one.rank][one.kind == PRIVATE])) for one in shards)

    def close(self) -> None:
        """Free the memory: what is written to a disk holds its files."""
        while self._sets:
            _close(self._sets.popitem()[1])

    def _opened(self) -> dict[int, RankFiles]:
        found: dict[int, RankFiles] = {}
        try:
            for rank in self._ranks:
                state = os.memfd_create(f"msrun-copy-{rank}", os.MFD_CLOEXEC)
                found[rank] = RankFiles(state, -1)
                private = os.memfd_create(f"msrun-copy-{rank}-private", os.MFD_CLOEXEC)
                found[rank] = RankFiles(state, private)
        except OSError:
            _close(found)
            raise
        return found


def _close(files: dict[int, RankFiles]) -> None:
    for each in files.values():
        for fd in each:
            if fd >= 0:
                os.close(fd)
