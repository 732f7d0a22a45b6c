"""The ranks of a job whose memory outlives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agent.controller import actions as do
from agent.kept.kept_rank import KeptRank
from agent.kept.reading import KeptReading
from worker_hooks.contract.status_page import Page
from worker_hooks.machine.free_memory import free_bytes
from worker_hooks.machine.kept_memory import StateMap

_ROOM = 2  # so many times the memory of dead ranks must be free, to free theirs later


class KeptRanks:
    """By rank, of one attempt."""

    def __init__(self) -> None:
        """There are none."""
        self._ranks: dict[int, tuple[int, KeptRank]] = {}  # with the keeper's process id
        self._dead: set[int] = set()
        self._replaced: list[tuple[int, KeptRank]] = []  # of dead ranks that have a successor
        self._why_over = ""

    @property
    def why_over(self) -> str:
        """Why the memory of no rank is kept any more; empty: it may be."""
        return self._why_over

    def give_up(self, why: str) -> None:
        """Keep nothing more in this attempt, nor of ranks that replace others in it."""
        self._why_over = why
        self.drop(self._ranks)

    def keep(self, rank: int, keeper: int, board: int) -> None:
        """A rank has a keeper; it says so again whenever it registers.

        Raises:
            OSError: its memory cannot be read.
        """
        known = self._ranks.get(rank)
        if known is not None and known[0] == keeper:
            return
        self.drop([rank])
        self._ranks[rank] = keeper, KeptRank(keeper, board)

    @property
    def keepers(self) -> frozenset[int]:
        """The process ids of all keepers."""
        return frozenset(keeper for keeper, _ in (*self._ranks.values(), *self._replaced))

    def steps(self, rank: int) -> tuple[int, ...]:
        """A rank has ended: the steps that its memory holds whole, the newest first."""
        self.free_replaced()  # what this death takes is not to be short for that
        if rank not in self._ranks:
            return ()
        self._dead.add(rank)
        return tuple(state.step for state in self._ranks[rank][1].states())

    def reading(
        self, action: do.CommitDump, pages: Mapping[int, Page], every: Sequence[int]
    ) -> KeptReading:
        """As :class:`agent.dump.draft.KeptSource` says."""
        found: dict[int, tuple[KeptRank, StateMap]] = {}
        for rank in sorted(self._dead):
            _, kept = self._ranks[rank]
            for state in kept.states():
                if state.step == action.step:
                    found[rank] = kept, state
        return KeptReading(found, action, pages, every)

    def held_nbytes(self) -> int:
        """Bytes that dead ranks' memory takes, until it is dropped."""
        return sum(self._ranks[rank][1].nbytes() for rank in self._dead)

    def drop(self, ranks: Iterable[int]) -> None:
        """Free the memory of these."""
        for rank in list(ranks):
            self._dead.discard(rank)
            if (known := self._ranks.pop(rank, None)) is not None:
                known[1].close()

    def replace(self, ranks: Iterable[int]) -> None:
        """New ranks take the places of these: their memory is of no use any more.

        To free it takes a processor for 0.2 s per GiB. New ranks are awaited by all others, so it
        is left for :meth:`free_replaced` if what they will take is free, and as much again.
        """
        gone = [rank for rank in ranks if rank in self._ranks]
        held, free = sum(self._ranks[rank][1].nbytes() for rank in gone), free_bytes()
        if free is None or free < _ROOM * held:
            self.drop(gone)
            return
        self._dead.difference_update(gone)
        self._replaced += (self._ranks.pop(rank) for rank in gone)

    def free_replaced(self) -> None:
        """The new ranks train: free what :meth:`replace` has left."""
        replaced, self._replaced = self._replaced, []
        for _, kept in replaced:
            kept.close()

    def drop_dead(self) -> None:
        """Nobody will need what dead ranks held."""
        self.drop(self._dead)

    def close(self) -> None:
        """Free all of it: every rank is gone."""
        self._why_over = ""
        self.free_replaced()
        self.drop(self._ranks)
