"""One dump in the making: the agent's share of the files, and the commit. All of it is file work.

The ranks write the replicated state; from here come every rank's private state, the manifest, and
the rename that makes the dump true. Called in the scribe's thread only, but for ``abandon``.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from agent.dump.unfinished_folder import AbandonedError, UnfinishedFolder
from agent.hooks.status_pages import record
from agent.records.file_thread import side_by_side
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.contract.protocol import Written
from worker_hooks.contract.status_page import CommitRecord, Page
from worker_hooks.storage import commit
from worker_hooks.storage.manifest import DUMP_KIND, PRIVATE, REPLICATED, Manifest, Shard


class DumpOrder(NamedTuple):
    """What a complete dump is made of, and why it was made."""

    written: Mapping[int, Written]  # by rank; those of no variant are left out
    variants: tuple[tuple[int, ...], ...]
    odd: tuple[int, ...]
    world_size: int
    attempt: int
    record_id: str
    reason: str


class SavedDump(NamedTuple):
    """A complete dump."""

    path: str
    nbytes: int
    without_private: tuple[int, ...]
    stale_private: tuple[int, ...]


def describe(
    kind: str,
    step: int,
    order: DumpOrder,
    shards: Sequence[Shard],
    ranks: Sequence[int],
    stale: tuple[int, ...],
    found: CommitRecord | None,
) -> Manifest:
    """What a manifest says of a checkpoint that is complete but for it.

    Args:
        kind: of the checkpoint.
        step: that it holds.
        order: what it is made of.
        shards: all files.
        ranks: everyone whose private state belongs into it.
        stale: those of an earlier step's.
        found: the record of that step of a rank that wrote.
    """
    private = {shard.rank for shard in shards if shard.kind == PRIVATE}
    return Manifest(
        kind=kind,
        step=step,
        epoch=0 if found is None else found.epoch,
        batch=0 if found is None else found.batch,
        world_size=order.world_size,
        attempt=order.attempt,
        record_id=order.record_id,
        reason=order.reason,
        saved_at=time.time(),
        shards=tuple(shards),
        digest=order.written[order.variants[0][0]].digest,
        odd=order.odd,
        without_private=tuple(rank for rank in ranks if rank not in private),
        stale_private=stale,
    )


class DiskDump:
    """The dump of one step in one place, until it is complete or given up."""

    is_quick = False

    def __init__(
        self, layout: DumpLayout, step: int, ranks: Sequence[int], pages: Mapping[int, Page]
    ) -> None:
        """``ranks``: everyone whose private state belongs into it; ``pages`` hold that state."""
        self.layout = layout
        self.step = step
        self._ranks = ranks
        self._pages = pages
        self._private: list[Shard] = []
        self._stale: list[int] = []
        self._failure: OSError | AbandonedError | None = None
        self._folder = UnfinishedFolder(layout)

    def begin(self) -> None:
        """Make the folder; what an interrupted dump left there is removed.

        Raises:
            OSError: the place cannot be written to.
        """
        self._folder.begin()

    def place_of(self, _rank: int) -> str:
        """Where a writer writes."""
        return str(self.layout.unfinished)

    def write_private(self, advance: Callable[[int], None]) -> None:
        """Write every rank's private state, the dead ones' too, from their pages.

        Meanwhile the ranks write theirs; what goes wrong here is said at the commit.
        """
        try:
            side_by_side(lambda rank: self._write_private(rank, advance), self._ranks)
        except (OSError, AbandonedError) as error:
            self._failure = error.with_traceback(None)  # whose frames hold pages

    def _write_private(self, rank: int, advance: Callable[[int], None]) -> None:
        self._folder.check()
        page = self._pages.get(rank)
        found = record(page, self.step)
        if page is None or found is None:
            return
        folder = self.layout.unfinished
        try:
            shard = commit.write_private(folder, rank, page.entries, found, advance)
        except (ValueError, TypeError, KeyError):
            return  # a page that describes itself wrongly is as good as none
        self._private.append(shard)
        if found.step != self.step:
            self._stale.append(rank)

    def commit(self, order: DumpOrder) -> SavedDump:
        """Complete the dump.

        Raises:
            OSError: the place cannot be written to, or lost what was written there.
            AbandonedError: the dump was given up.
        """
        if self._failure is not None:
            raise self._failure
        shards = [*self._private, *self._replicated(order)]
        found = record(self._pages.get(order.variants[0][0]), self.step)
        stale = tuple(sorted(self._stale))
        manifest = describe(DUMP_KIND, self.step, order, shards, self._ranks, stale, found)
        self._folder.check()
        commit.commit(self.layout, manifest)
        nbytes = sum(shard.nbytes for shard in shards)
        path = str(self.layout.folder)
        return SavedDump(path, nbytes, manifest.without_private, manifest.stale_private)

    def abandon(self) -> None:
        """As of :class:`UnfinishedFolder`."""
        self._folder.abandon()

    def remove(self) -> None:
        """As of :class:`UnfinishedFolder`."""
        self._folder.remove()

    def _replicated(self, order: DumpOrder) -> list[Shard]:
        shards = []
        for variant, writers in enumerate(order.variants):
            for rank in writers:
                done = order.written[rank]
                self._look_at(done)
                shards.append(Shard(done.file, rank, REPLICATED, done.nbytes, done.sha256, variant))
        return shards

    def _look_at(self, done: Written) -> None:
        path = self.layout.unfinished / done.file
        nbytes = os.lstat(path).st_size
        if nbytes != done.nbytes:
            raise OSError(errno.EIO, f"{nbytes} bytes instead of {done.nbytes}", str(path))
