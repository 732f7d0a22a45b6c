"""A rank's part in the vote on each update: see :mod:`worker_hooks.contract.vote_board`.

The main thread votes, and waits for all others. In a freeze the listener finds out how the vote
ended: a rank whose gate is closed casts no vote, and says so. So a vote is lost once a rank that
has not voted is shut, or dead; then nobody has begun the update, and nobody will. If all have
voted, each one makes the update, also if its gate is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from worker_hooks.contract.vote_board import VoteBoard
from worker_hooks.guard.peer_wait import await_peers

log = logging.getLogger("msrun")

PATIENCE_S = 60.0
"""A rank that makes no update in a step in which others do would let them wait for ever."""

NOT_ON_DEVICES = (
    "on an accelerator a death between two collectives of one backward may take its step along"
)
"""Why no vote is held there: the host's updates do not say when a device has its gradients."""

OFF = (
    "rank %d made its update without %s, which did not come to theirs within %g s: no vote is held "
    "any more, and a rank that dies between two collectives of one backward may take the step along"
)


class Vote(Protocol):
    """What the first update of a step waits for: UpdateVote, or UpdateClearance."""

    def cast(self, step: int) -> None:
        """The rank is ready to update."""

    def wait(self, step: int, check: Callable[[], bool], is_held: Callable[[], bool]) -> None:
        """Wait for the others, unless ``check``; ``is_held``: the wait has deadlines of others."""

    @property
    def waits_for_msrun(self) -> bool:
        """Whether the main thread, which is held, waits for what only msrun could say."""

    def shut(self, *, is_shut: bool) -> None:
        """The gate is closed, or open again."""

    def is_needed(self, step: int) -> bool:
        """Whether the update of this step needs all votes."""

    def result(self, step: int) -> bool | None:
        """Whether all make the update of this step; ``None``: it is not decided yet."""


class UpdateVote:
    """One rank's votes. ``gone`` returns the ranks whose processes have ended."""

    def __init__(
        self, board: VoteBoard, rank: int, step: int, gone: Callable[[], set[int]]
    ) -> None:
        """Take part from now on; ``step``: the newest commit."""
        self._board = board
        self._rank = rank
        self._gone = gone
        self.is_waiting = False
        """Whether the main thread waits for the votes of others."""
        board.vote(rank, step)

    # --- the main thread --------------------------------------------------------------------------

    def cast(self, step: int) -> None:
        """All gradients of the rank are there."""
        self._board.vote(self._rank, step)

    def wait(self, step: int, check: Callable[[], bool], is_held: Callable[[], bool]) -> None:
        """Wait until all have voted for the step, if it needs that.

        Args:
            check: whether to wait no longer; called between looks, and may raise.
            is_held: whether the rank is frozen or held, which has deadlines of its own.
        """
        board = self._board
        if board.has_all(step) or not board.is_needed(step):
            return

        def is_over() -> bool:
            return board.has_all(step) or not board.is_needed(step) or check()

        self.is_waiting = True
        try:
            await_peers(is_over, is_held, PATIENCE_S, lambda: self._end_votes(step))
        finally:
            self.is_waiting = False

    def _end_votes(self, step: int) -> None:
        late = ", ".join(f"rank {rank}" for rank in self._board.lacking(step))
        log.warning(OFF, self._rank, late, PATIENCE_S)
        self._board.begin(0)

    waits_for_msrun = False  # the ranks of a node need none to hear each other

    # --- the listener, once the main thread can cast no vote --------------------------------------

    def shut(self, *, is_shut: bool) -> None:
        """The gate is closed, or open again."""
        self._board.shut(self._rank, is_shut=is_shut)

    def is_needed(self, step: int) -> bool:
        """Whether the update of this step needs all votes."""
        return self._board.is_needed(step)

    def result(self, step: int) -> bool | None:
        """Whether all make the update of this step; ``None``: it is not decided yet."""
        board = self._board
        if not board.is_needed(step):
            return False
        lacking = board.lacking(step)
        never = {rank for rank in lacking if board.is_shut(rank)}
        never |= self._gone() & {*lacking} if lacking else set()
        # such a rank may have voted after the first look, but not after it was seen to be shut
        left = {*board.lacking(step)}
        if left & never:
            return False
        return None if left else True
