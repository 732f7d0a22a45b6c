"""One dump in the making: the agent's share of the files, and the manifest that completes it.

The ranks write the replicated state; the agent writes every rank's private state. This is the same
wherever the dump goes: the place is a :class:`~agent.dump.target.Target`. All of it is file work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from agent.controller import actions as do
from agent.dump.target import Advance, SavedDump, Target
from agent.machine.file_thread import side_by_side
from agent.ranks.parts import Parts
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.contract.protocol import Written
from worker_hooks.contract.status_page import CommitRecord, Entry, Page
from worker_hooks.storage import commit
from worker_hooks.storage.manifest import MEMORY_KIND, PRIVATE, Manifest, Shard
from worker_hooks.storage.private_records import completed, record


class DumpOrder(NamedTuple):
    """What a complete dump is made of, and why it was made."""

    written: Mapping[int, Written]  # by seat; files that no variant names are left out
    variants: tuple[tuple[int, ...], ...]
    odd: tuple[int, ...]
    world_size: int
    attempt: int
    record_id: str
    reason: str
    holders: tuple[tuple[int, ...], ...] = ()
    is_disputed: bool = False


class DumpDraft:
    """The files of one step in one place, until the dump is complete or abandoned."""

    def __init__(
        self, target: Target, step: int, ranks: Sequence[int], pages: Mapping[int, Page]
    ) -> None:
        """``ranks``: those whose private state belongs to the dump; ``pages`` hold that state."""
        self.step = step
        self.position: tuple[int, int] | None = None  # epoch, from 1, and batch; once complete
        self.manifest: Manifest | None = None  # once complete
        self._target = target
        self._ranks = ranks
        self._pages = pages
        self._private: list[Shard] = []
        self._stale: list[int] = []
        self._failure: Exception | None = None
        self._newest_head: tuple[object, bytes] = None, b""  # and what it was made of

    def write_private(self, advance: Advance) -> None:
        """Write every rank's private state from its page, a dead rank's too.

        The ranks write meanwhile. A failure here is raised by the commit.
        """
        try:
            records = completed(self._pages, self._ranks, self.step)
            if self._target.kind == MEMORY_KIND:  # no disk to wait for: threads would only compete
                for rank, one in records.items():
                    self._write_private(rank, one, advance)
            else:
                side_by_side(
                    lambda rank: self._write_private(rank, records[rank], advance), list(records)
                )
        except Exception as error:  # noqa: BLE001  a rank may have written anything to its page
            self._failure = error.with_traceback(None)  # whose frames hold pages

    def _write_private(self, rank: int, found: CommitRecord, advance: Advance) -> None:
        try:
            head = self._head_of(self._pages[rank].entries, found)
        except (ValueError, TypeError, KeyError):
            return  # a page that describes itself wrongly is as good as none
        shard = Shard(DumpLayout.private(rank), rank, PRIVATE, nbytes=0, sha256="")
        written = self._target.write(shard, head, [found.payload], advance)
        is_early = self._target.kind == MEMORY_KIND and not found.is_commit
        self._private.append(written._replace(is_early=is_early))
        if found.step != self.step:
            self._stale.append(rank)

    def _head_of(self, entries: Sequence[Entry], found: CommitRecord) -> bytes:
        """The same for nearly all of thousands of ranks: what is not in it is left out."""
        about = entries, found._replace(at_ns=0, payload=b"")
        known, head = self._newest_head
        if about != known:
            head = commit.private_head(*about)
            self._newest_head = about, head
        return head

    def commit(self, order: DumpOrder) -> SavedDump:
        """Complete the dump.

        Raises:
            OSError: the place cannot be written to, or lost what was written there.
            AbandonedError: the dump was abandoned.
            UnknownStateError: the state is not complete.
            IncompleteStateError: parts of it were not written.
        """
        if self._failure is not None:
            raise self._failure
        shards = (*self._private, *self._replicated(order))
        first_writer = order.written[order.variants[0][0]].rank
        digests = [order.written[writers[0]].digest for writers in order.variants]
        is_of_groups = bool(order.holders) and self._target.kind == MEMORY_KIND
        found = record(self._pages.get(first_writer), self.step)
        about = Manifest(
            self._target.kind,
            step=self.step,
            epoch=0 if found is None else found.epoch,
            batch=0 if found is None else found.batch,
            world_size=order.world_size,
            attempt=order.attempt,
            record_id=order.record_id,
            reason=order.reason,
            shards=shards,
            digest=",".join(digests) if is_of_groups else digests[0],
            odd=order.odd,
            stale_private=tuple(sorted(self._stale)),
            holders=order.holders,
            is_disputed=order.is_disputed,
            absent=self._target.absent,
        ).completed(self._ranks)
        path = self._target.commit(about)
        self.manifest = about
        self.position = None if found is None else (found.epoch + 1, found.batch)
        self._pages = {}
        return SavedDump.at(path, about)

    def _replicated(self, order: DumpOrder) -> Iterable[Shard]:
        for variant, writers in enumerate(order.variants):
            for seat in writers:
                yield self._target.accept(order.written[seat], variant)


def private_nbytes(pages: Mapping[int, Page]) -> int:
    """How many bytes the private state of these ranks takes."""
    return sum(entry.nbytes for page in pages.values() for entry in page.entries)


def state_nbytes(action: do.SaveRanks, parts: Parts, sizes: Mapping[int, tuple[int, int]]) -> int:
    """About how many bytes a dump of all parts of the state takes.

    ``sizes``: of each rank's state, as it said; and what of it is in host memory.
    """

    def share(seat: int) -> int:  # those that a rank has make up its state
        rank = parts.rank_of(seat)
        return sizes.get(rank, (0, 0))[0] // len(parts.of_rank(rank))

    groups = action.groups or (tuple(sizes),)  # each writes its part
    return sum(max(map(share, seats), default=0) for seats in groups)


class KeptDump(Protocol):
    """A dump in memory that is to be made of what killed ranks have left."""

    @property
    def save(self) -> do.SaveRanks:
        """What a dump by living ranks would have been ordered by."""

    @property
    def target(self) -> Target:
        """Where it goes."""

    @property
    def draft(self) -> DumpDraft:
        """Itself."""

    def run(self, order: DumpOrder, advance: Advance) -> SavedDump:
        """Make it; file work, which raises what a commit does."""


class KeptSource(Protocol):
    """The memory of ranks that were killed."""

    def reading(
        self, action: do.CommitDump, pages: Mapping[int, Page], every: Sequence[int]
    ) -> KeptDump:
        """A dump of the action's step. ``pages``: of all ranks; they hold the private state."""

    def held_nbytes(self) -> int:
        """How much memory they still take, until :meth:`drop_dead`."""

    def drop_dead(self) -> None:
        """Nobody will need what dead ranks held."""

    def free_replaced(self) -> None:
        """Those that were replaced train: free what is left of the memory of the dead ones."""
