"""What this rank's updates wait for: the votes of a node's ranks, or a clearance of all nodes."""

from __future__ import annotations

from collections.abc import Callable

from worker_hooks.contract.clearance_board import ClearanceBoard
from worker_hooks.contract.protocol import OpenVote
from worker_hooks.contract.vote_board import VoteBoard
from worker_hooks.guard.gate import Gate
from worker_hooks.guard.peers import KnownPeers
from worker_hooks.guard.update_clearance import UpdateClearance
from worker_hooks.guard.update_vote import NOT_ON_DEVICES, UpdateVote
from worker_hooks.state.committed_state import CommittedState


class RankVote:
    """Takes part once msrun has ordered it."""

    def __init__(
        self,
        gate: Gate,
        source: CommittedState,
        peers: KnownPeers,
        tell: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        """Take the parts.

        Args:
            gate: waits in front of updates.
            tell: tells msrun the step whose update needs nothing more of this rank; may raise
                ``OSError``.
            say: prints a sentence for people.
        """
        self._gate = gate
        self._source = source
        self._peers = peers
        self._tell = tell
        self._say = say

    def take_part(self, order: OpenVote, board: int, rank: int) -> str:
        """Obey; why not, if updates wait for nobody: those of an accelerator begin when it likes.

        ``board``: its descriptor, which stays the caller's.
        """
        if self._source.device is not None:
            return NOT_ON_DEVICES
        if order.is_over_nodes:
            self._gate.vote = UpdateClearance(
                ClearanceBoard(board), rank, self._tell, self._say, is_cut=order.is_cut
            )
        else:
            step = self._source.step
            self._gate.vote = UpdateVote(VoteBoard(board), rank, step, self._peers.gone)
        return ""

    def backward_begins(self) -> int:
        """The record of the step under way is written: the step that the rank is ready for, or 0.

        Behind an update that was made the step waits for nobody any more.
        """
        vote = self._gate.vote
        if not isinstance(vote, UpdateClearance) or self._gate.is_torn:
            return 0
        return vote.backward_begins(self._source.step + 1)
