"""A node's part in the clearance of updates: see :mod:`worker_hooks.contract.clearance_board`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from agent.hooks.rank_links import RankLinks
from agent.nodes.run_messages import UpdatesCleared
from worker_hooks.contract import clearance_board, protocol
from worker_hooks.contract.clearance_board import ClearanceBoard


class NodeClearance:
    """The board of the present attempt, and how far the ranks of the node are."""

    def __init__(self, links: RankLinks, ranks: Sequence[int]) -> None:
        """No rank waits for anything yet; ``ranks``: of this node."""
        self._links = links
        self._ranks = ranks
        self._board: ClearanceBoard | None = None
        self._fd = -1
        self._ready: dict[int, int] = {}  # rank -> the newest step that it is ready for

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
            self._board.clear(message.cleared)
            self._board.begin(message.first, message.first_vote)

    def stop(self) -> None:
        """Nobody clears updates any more: ranks here do not wait."""
        if self._board is not None:
            self._board.begin(0)

    def ready(self, rank: int, step: int) -> int:
        """A rank here is ready for the update of a step.

        Returns:
            The newest step that all ranks here are ready for, if that is news; else 0.
        """
        before = self._least()
        self._ready[rank] = step
        least = self._least()
        return least if least > before else 0

    def _least(self) -> int:
        return min(self._ready.values()) if len(self._ready) == len(self._ranks) else 0

    def close(self) -> None:
        """The attempt is over, or some ranks are replaced: they get a new board."""
        self._ready.clear()
        if self._board is not None:
            self._board.close()
            os.close(self._fd)
            self._board = None
