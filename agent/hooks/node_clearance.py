"""A node's part in the clearance of updates: see :mod:`worker_hooks.contract.clearance_board`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agent.hooks.rank_links import RankLinks
from worker_hooks.contract import clearance_board, protocol
from worker_hooks.contract.clearance_board import ClearanceBoard

if TYPE_CHECKING:
    from agent.nodes.run_messages import UpdatesCleared

LOOK_S = 0.2  # between looks whether ranks wait; a few of them fit into the patience of ranks
MOST_DOUBT = (
    13  # times the limit of silence: one more than VERY_CALM, so who is mute is lost by then
)
Later = Callable[[float, Callable[[], None]], object]
"""Calls something after so many seconds."""


class NodeClearance:
    """The board of the present attempt, and how far the ranks of the node are."""

    def __init__(self, links: RankLinks, ranks: Sequence[int], limit_s: float) -> None:
        """No rank waits for anything yet.

        Args:
            ranks: of this node.
            limit_s: ``--node-timeout``.
        """
        self._most_doubt_s = math.ceil(MOST_DOUBT * limit_s)
        self._links = links
        self._ranks = ranks
        self._board: ClearanceBoard | None = None
        self._fd = -1
        self._ready: dict[int, int] = {}  # rank -> the newest step that it is ready for
        self._later: Later | None = None
        self._will_look = False
        self._is_told_doubt = False  # the controller's node doubts a line of its own

    def attach(
        self, later: Later, is_in_doubt: Callable[[], bool], ask: Callable[[int], None]
    ) -> None:
        """Look at the lines while ranks wait.

        Args:
            later: calls something after so many seconds.
            is_in_doubt: whether the line to the controller's node has been since it was last asked.
            ask: says on that line once more for which step the ranks here are ready.
        """
        self._later, self._is_in_doubt, self._ask = later, is_in_doubt, ask

    def hand(self, rank: int, order: protocol.OpenVote) -> bool:
        """Hand a rank the board; whether there is memory, and a descriptor could be sent."""
        if self._board is None:
            try:
                self._board = self._create()
            except OSError:
                return False
        return self._links.send(rank, order, [self._fd])

    def _create(self) -> ClearanceBoard:
        self._fd = clearance_board.create()
        try:
            return ClearanceBoard(self._fd)
        except OSError:
            os.close(self._fd)
            raise

    def take(self, message: UpdatesCleared) -> None:
        """Tell the ranks here what the controller's node has decided."""
        if self._board is not None:
            self._is_told_doubt = message.is_in_doubt
            self._board.clear(message.cleared)
            self._board.begin(message.first, message.first_vote)
            self._doubt(self._board, is_in_doubt=message.is_in_doubt)

    def stop(self) -> None:
        """Nobody clears updates any more: ranks here do not wait."""
        if self._board is not None:
            self._board.begin(0)

    def doubt(self) -> None:
        """Nobody clears updates for a moment: ranks here wait longer, until :meth:`close`."""
        self._is_told_doubt = True
        if self._board is not None:
            self._doubt(self._board, is_in_doubt=True)

    def _doubt(self, board: ClearanceBoard, *, is_in_doubt: bool) -> None:
        board.doubt(self._most_doubt_s if is_in_doubt else 0)

    def ready(self, rank: int, step: int) -> int:
        """A rank here is ready for the update of a step.

        Returns:
            The newest step that all ranks here are ready for, if that is news; else 0.
        """
        before = self._least()
        self._ready[rank] = step
        self._look_later()
        least = self._least()
        return least if least > before else 0

    def _least(self) -> int:
        return min(self._ready.values()) if len(self._ready) == len(self._ranks) else 0

    def _look_later(self) -> None:
        if self._later is not None and not self._will_look:
            self._will_look = True
            self._later(LOOK_S, self._look)

    def _look(self) -> None:
        """Ask for a sign of life while ranks wait: an idle line shows nothing of a cut."""
        self._will_look = False
        if self._board is None:
            return
        if self._board.is_awaited:
            is_in_doubt = self._is_in_doubt() or self._is_told_doubt
            self._doubt(self._board, is_in_doubt=is_in_doubt)
            self._ask(self._least())
        elif self._board.is_cleared(max(self._ready.values(), default=0)):
            return  # nobody waits before it is ready for another step
        self._look_later()

    def close(self) -> None:
        """The attempt is over, or some ranks are replaced: they get a new board."""
        self._ready.clear()
        self._is_told_doubt = False
        if self._board is not None:
            self._board.close()
            os.close(self._fd)
            self._board = None
