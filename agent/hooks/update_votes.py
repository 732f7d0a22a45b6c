"""Has the ranks vote on each update, where they hold different parts of the state.

The agent only makes the board and hands it out: see :mod:`worker_hooks.contract.vote_board`. Ranks
take it at different times. So no update waits for votes before all have it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence

from agent.hooks.rank_links import RankLinks
from agent.records.journal import Journal
from worker_hooks.contract import protocol, vote_board
from worker_hooks.contract.vote_board import VoteBoard

AHEAD = 2  # steps: a rank that takes the board may have begun the next update unseen


class UpdateVotes:
    """The board of the present attempt, if there is one."""

    def __init__(self, links: RankLinks, ranks: Sequence[int], journal: Journal) -> None:
        """Nobody votes before :meth:`open`."""
        self._links = links
        self._ranks = ranks
        self._journal = journal
        self._board: VoteBoard | None = None
        self._fd = -1
        self._owed: list[int] = []  # ranks that could not be sent the board yet
        self._steps: dict[int, int] = {}  # by rank: its newest commit when it took the board

    def open(self, attempt: int, registered: Collection[int], *, is_cut: bool) -> None:  # noqa: ARG002
        """Hand a board to all ranks that have none; without memory there is no vote.

        Called again and again: the kernel may not take so many descriptors at once.
        ``is_cut``: whether ranks hold different parts of the state: else nobody votes.
        """
        if not is_cut:
            return
        if self._board is None:
            with contextlib.suppress(OSError):
                self._board, self._owed = self._create(), [*self._ranks]
        vote = protocol.OpenVote()
        self._owed = [rank for rank in self._owed if not self._links.send(rank, vote, [self._fd])]

    def _create(self) -> VoteBoard:
        self._fd = vote_board.create(max(self._ranks) + 1)
        try:
            return VoteBoard(self._fd)
        except OSError:
            os.close(self._fd)
            raise

    def hear(self, message: protocol.VoteOpened) -> None:
        """A rank has taken the board, or votes on nothing."""
        if message.why_not:
            return
        self._steps[message.rank] = message.step
        if self._board is not None and len(self._steps) == len(self._ranks):
            first = max(self._steps.values()) + AHEAD
            self._board.begin(first)
            self._journal.event("VoteBegan", step=first)

    def freeze(self) -> None:
        """A freeze is ordered: the board shows how the vote ends."""

    def go_on(self) -> None:
        """Ranks train on."""

    def ready_here(self, rank: int, step: int) -> int:  # noqa: ARG002
        """Nothing is awaited: a rank says this in a job on several nodes."""
        return 0

    def close(self) -> None:
        """The attempt is over, or some of its ranks are replaced: they get a new board."""
        self._steps.clear()
        if self._board is not None:
            self._board.close()
            os.close(self._fd)
            self._board, self._owed = None, []
