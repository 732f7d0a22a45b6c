"""A rank's part in the clearance of updates: see :mod:`worker_hooks.contract.clearance_board`.

The rank says that it is ready for the update of a step as backward begins: what it alone holds is
on its page then, and the answer has the time of the backward to come. Where gradients are
accumulated the last backward counts, which only the update shows; and where ranks hold different
parts of the state it is a vote, that all gradients are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from worker_hooks.contract.clearance_board import MOST_MISSES, ClearanceBoard
from worker_hooks.guard.peer_wait import await_peers

PATIENCE_S = 2.0
"""Replicas go on without one then: a msrun is slow, or a rank makes no update in the step.

By then node 0 has noticed that a msrun is stopped: each says something every second.
"""

VOTE_PATIENCE_S = 60.0
"""The same for a vote, where to go on may cost the step if a rank dies in it."""

OFF = (
    "updates wait no more for other nodes: rank {rank} has begun {times} of them without, as they "
    "did not answer within {seconds:g} s. {cost}"
)
STALE = (
    "If a node dies, its ranks may go on with random numbers, data position and buffers of a step "
    "before, which would be said"
)
APART = "If a rank dies between two collectives of one backward, the step may be lost"


class UpdateClearance:
    """In place of the :class:`~worker_hooks.guard.update_vote.UpdateVote` of a single node."""

    def __init__(
        self,
        board: ClearanceBoard,
        rank: int,
        tell: Callable[[int], None],
        say: Callable[[str], None],
        *,
        is_cut: bool,
    ) -> None:
        """Take part from now on.

        Args:
            tell: tells msrun the step that the rank is ready to update; may raise ``OSError``.
            say: prints a sentence for people.
            is_cut: ranks hold different parts of the state.
        """
        self._board = board
        self._rank = rank
        self._tell = tell
        self._say = say
        self._is_cut = is_cut
        self._said = 0  # the newest step that msrun was told of
        self._waits_for_update = is_cut  # before it is told
        self._waits_for = 0  # the step that the main thread wants to update
        self._is_waiving = False
        self.is_waiting = False
        """Whether the main thread waits for others."""

    # --- the main thread --------------------------------------------------------------------------

    def backward_begins(self, step: int) -> int:
        """The record of the step is on the page: what to tell msrun, the step or 0."""
        if self._waits_for_update:
            return 0
        if self._said == step:  # one backward more
            self._waits_for_update = True
            return 0
        self._said = step
        return step

    def cast(self, step: int) -> None:
        """All gradients of the rank are there."""
        if self._waits_for_update or self._said < step:
            self._said = step
            try:
                self._tell(step)
            except OSError:  # msrun is gone, or does not read
                self._said = 0

    def wait(self, step: int, check: Callable[[], bool], is_held: Callable[[], bool]) -> None:
        """Wait until the update of the step is cleared, if it needs that.

        Args:
            check: whether to wait no longer; called between looks, and may raise.
            is_held: whether the rank is frozen or held, which has deadlines of its own.
        """
        if self._is_open(step):
            return
        patience_s = VOTE_PATIENCE_S if self._is_cut else PATIENCE_S
        since_s = time.monotonic()
        if not self._is_cut:
            self._board.wait_for(step)

        def is_over() -> bool:
            return self._is_open(step) or check()

        def is_patient() -> bool:
            """To go on now would cost what a node alone holds, if that is lost."""
            doubt_s = 0 if self._is_cut else self._board.doubt_s
            return is_held() or time.monotonic() < since_s + doubt_s

        self._waits_for = step
        self.is_waiting = True
        try:
            late = partial(self._go_on_without, step, patience_s, is_held)
            await_peers(is_over, is_patient, patience_s, late)
        finally:
            self.is_waiting = False

    def _go_on_without(self, step: int, patience_s: float, is_held: Callable[[], bool]) -> None:
        self._is_waiving = True  # first: who holds the rank looks at this afterwards
        times = 0 if is_held() else self._board.waive(step)
        self._is_waiving = False
        if times == MOST_MISSES:
            cost = APART if self._is_cut else STALE
            self._say(OFF.format(rank=self._rank, times=times, seconds=patience_s, cost=cost))

    def _is_open(self, step: int) -> bool:
        board = self._board
        return board.is_cleared(step) or not board.is_needed(step) or board.is_waived(step)

    # --- the listener -----------------------------------------------------------------------------

    @property
    def waits_for_msrun(self) -> bool:
        """Whether the main thread, which is held, waits for a clearance, as all of its node do."""
        is_waiting = self.is_waiting and not self._is_waiving
        return is_waiting and not self._is_open(self._waits_for)

    def shut(self, *, is_shut: bool) -> None:
        """The gate is closed, or open again: the controller's node knows, as it has ordered it."""

    def is_needed(self, step: int) -> bool:
        """Whether the update of this step needs the votes of all."""
        return self._board.is_vote(step)

    def result(self, step: int) -> bool:
        """Whether all make the update of this step.

        It is decided: the controller's node clears nothing more once it has ordered a freeze, and
        what it has cleared came before that order.
        """
        return self._board.is_vote(step) and self._board.is_cleared(step)
