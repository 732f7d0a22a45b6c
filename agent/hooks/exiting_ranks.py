"""Ranks that want to exit by themselves: each may, unless a dump or a peer needs it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from agent.controller.drain import DRAINING
from agent.controller.states import JobState
from agent.hooks.rank_links import RankLinks, Timer
from agent.hooks.status_pages import StatusPages
from worker_hooks.contract import protocol

TRAINING = frozenset({JobState.STARTING, JobState.RUNNING, JobState.HOLDING})
PATIENCE_S = 30.0  # how long a finished rank waits for its peers, which may train much longer
DOUBT_S = 0.5  # how long to wait for a death notice when an unfinished rank wants to exit


class ExitingRanks:
    """Those of the present attempt."""

    def __init__(self, links: RankLinks, pages: StatusPages, training: AbstractSet[int]) -> None:
        """Know no such rank yet.

        Args:
            links: to the ranks.
            pages: the ranks' status pages.
            training: ranks that registered and are neither gone nor about to exit; it changes.
        """
        self._links = links
        self._pages = pages
        self._training = training
        self._waiting: dict[int, bool] = {}  # rank -> whether its training is over
        self._finished: set[int] = set()  # may exit after their training
        self._patience: Timer | None = None  # of finished ranks, with others
        self._doubts: dict[int, Timer] = {}  # unfinished ranks, which perhaps flee a death
        self._state = JobState.NEW
        self.agreed = 0  # the step that all come to in a graceful exit; 0: none yet

    def attach(self, call_later: Callable[..., Timer]) -> None:
        """``call_later``: the loop's."""
        self._call_later = call_later

    def add(self, rank: int, *, is_done: bool) -> None:
        """A rank wants to exit, perhaps because its training is over; it waits."""
        self._waiting[rank] = is_done
        if is_done and self._patience is None:
            self._patience = self._call_later(PATIENCE_S, self._lose_patience)
        if not is_done and rank not in self._doubts:
            self._doubts[rank] = self._call_later(DOUBT_S, lambda: self._end_doubt(rank))

    def forget(self, rank: int) -> None:
        """A rank is gone, or trains again after all."""
        self._waiting.pop(rank, None)
        if (doubt := self._doubts.pop(rank, None)) is not None:
            doubt.cancel()

    def take_back(self, rank: int) -> None:
        """A rank that may have exited is a new process now, or trains again."""
        self.forget(rank)
        self._finished.discard(rank)

    def has_finished(self, rank: int) -> bool:
        """Whether a rank may exit after its training."""
        return rank in self._finished

    def decided(self, state: JobState) -> None:
        """The job is in this state now."""
        self._state = state
        self.let_go()

    def let_go(self) -> None:
        """Release the ranks that wait, unless a dump needs them or a peer still may.

        A finished rank holds the last step: if a peer dies in that step, no other rank may hold it.
        One that finished before the step of a graceful exit is in the way of that exit. While lost
        ranks are replaced, a finished rank has to join them; an unfinished one cannot. A rank that
        wants to exit in the middle of training may have noticed the end of a peer before the agent.
        """
        if self._state in DRAINING:
            return
        may_be_needed = bool(self._training) and self._state in TRAINING
        is_awaited = may_be_needed and self._patience is not None
        is_needed = is_awaited or self._state is JobState.REPLACING
        doubted = self._doubts if may_be_needed else {}
        kept = {
            rank: is_done
            for rank, is_done in self._waiting.items()
            if (is_needed and not self._is_behind(rank) if is_done else rank in doubted)
        }
        released = self._waiting.keys() - kept.keys()
        self._finished |= {rank for rank in released if self._waiting[rank]}
        self._waiting = kept
        release = protocol.Release(f"the job is {self._state.value}")
        for rank in sorted(released):  # for a rank that is gone this calls `forget`
            self._links.send(rank, release)

    def _is_behind(self, rank: int) -> bool:
        return (self._pages.newest_step(rank) or 0) < self.agreed

    def _end_doubt(self, rank: int) -> None:
        del self._doubts[rank]
        self.let_go()

    def _lose_patience(self) -> None:
        self.end_patience()
        self.let_go()

    def end_patience(self) -> None:
        """Finished ranks wait for their peers no longer."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def clear(self) -> None:
        """Every rank is gone."""
        self._waiting.clear()
        for rank in tuple(self._doubts):
            self.forget(rank)
        self._finished.clear()
        self.agreed = 0
        self.end_patience()
