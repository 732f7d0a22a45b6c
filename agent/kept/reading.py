"""A dump in memory made of what killed ranks have left in theirs. All of it is file work."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from agent.controller import actions as do
from agent.dump.draft import DumpDraft, DumpOrder, private_nbytes
from agent.dump.memory import MemoryTarget
from agent.dump.room import needed
from agent.dump.target import Advance, LostStateError, SavedDump
from agent.kept.kept_rank import KeptRank
from agent.machine.file_thread import side_by_side
from worker_hooks.contract.protocol import Written
from worker_hooks.contract.status_page import Page
from worker_hooks.machine.kept_memory import StateMap


class KeptReading:
    """Of one step; made in the loop, and carried out in a thread."""

    def __init__(
        self,
        found: Mapping[int, tuple[KeptRank, StateMap]],
        action: do.CommitDump,
        pages: Mapping[int, Page],
        every: Sequence[int],
    ) -> None:
        """Prepare; nothing is read or written.

        Args:
            found: what dead ranks hold of the step.
            action: what to make of it.
            pages: of all ranks; they hold the private state.
        """
        self._found = found
        of = action.holders or (tuple(every),)
        self._writers = tuple(writers[0] for writers in action.variants)
        self._groups = [[rank for rank in group if rank in self._found] for group in of]
        private = private_nbytes(pages)
        state = sum(self._found[rank][1].nbytes for rank in self._writers if rank in self._found)
        wanted = needed(state=state, host=0, private=private, gone=0)
        self.target = MemoryTarget(action.step, private_nbytes=private, needed_nbytes=wanted)
        self.draft = DumpDraft(self.target, action.step, every, pages)
        self.save = do.SaveRanks(
            action.dump_id, action.step, self._writers, (), do.MEMORY, action.reason
        )
        """What a dump by living ranks would have been ordered by."""

    def run(self, order: DumpOrder, advance: Advance) -> SavedDump:
        """Write it to files in memory. ``order``: what completes it, without what is written.

        Raises:
            OSError: there is no room, or the memory of a rank is gone.
            LostStateError: replicas differ, so that nobody knows which is right.
            AbandonedError, UnknownStateError, IncompleteStateError: as :meth:`DumpDraft.commit`.
        """
        if lost := [rank for rank in self._writers if rank not in self._found]:
            raise LostStateError(f"that of rank {lost[0]} is gone")
        self.target.begin()
        self.draft.write_private(advance)
        written: dict[int, Written] = {}
        digests: dict[int, str] = {}

        def read(rank: int) -> None:
            memory, state = self._found[rank]
            if rank in self._writers:
                digests[rank] = self._write(rank, advance)
                told = digests[rank]
                written[rank] = Written(rank, order.attempt, 0, "", state.nbytes, "", told)
            else:
                digests[rank] = memory.checksum(state, lambda piece: advance(len(piece)))

        side_by_side(read, [rank for group in self._groups for rank in group])
        for group in self._groups:
            if len({digests[rank] for rank in group}) > 1:
                raise LostStateError(f"that of ranks {', '.join(map(str, group))} is not the same")
        return self.draft.commit(order._replace(written=written))

    def _write(self, rank: int, advance: Advance) -> str:
        """Write a rank's file; the checksum of what its replicas hold, too."""
        memory, state = self._found[rank]
        file = os.open(self.target.place_of(rank), os.O_WRONLY | os.O_CLOEXEC)

        def put(piece: bytes) -> None:
            left = memoryview(piece)
            while left:
                left = left[os.write(file, left) :]
            advance(len(piece))

        try:
            return memory.checksum(state, put)
        finally:
            os.close(file)
