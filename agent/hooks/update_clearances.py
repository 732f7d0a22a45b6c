"""On the controller's node: clears the updates of a job on several nodes.

An update is cleared once every rank is ready for it. By then what each of them alone holds has
left its node: a node says that its ranks are ready on the line on which their pages came before,
and the node that keeps copies of the pages of this one has confirmed them. Where ranks hold
different parts of the state, this is the vote as well, and once a freeze is ordered nothing more is
cleared: so all ranks make an update, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from agent.hooks.node_clearance import LOOK_S, Later, NodeClearance
from agent.hooks.rank_links import RankLinks
from agent.records.journal import Journal
from worker_hooks.contract import protocol

if TYPE_CHECKING:
    from agent.nodes.run_messages import UpdatesCleared

AHEAD = 2  # steps: a rank that takes the board may have begun the next update unseen


class ClearedNode(Protocol):
    """Another node, to which the controller's has a line."""

    def clear(self, message: UpdatesCleared) -> None:
        """Let its ranks make their updates."""

    def is_in_doubt(self) -> bool:
        """Whether it may be lost: what was said before the last look is unanswered."""


class UpdateClearances:
    """Clears the updates of the present attempt."""

    def __init__(
        self,
        links: RankLinks,
        ranks: int,
        here: tuple[int, ...],
        journal: Journal,
        limit_s: float,
    ) -> None:
        """No rank waits for anything before :meth:`open`.

        Args:
            ranks: how many there are in the job.
            here: those of this node.
            journal: what is written about the run.
            limit_s: ``--node-timeout``.
        """
        self._links = links
        self._count = ranks
        self._journal = journal
        self._here = frozenset(here)
        self._node = NodeClearance(links, here, limit_s)
        self._others: Sequence[ClearedNode] = ()
        self._later: Later | None = None
        self._soon: Callable[[Callable[[], None]], object] = _at_once
        self._untold: UpdatesCleared | None = None  # to the ranks here
        self._has_looked = False  # a moment ago
        self._nodes: frozenset[int] = frozenset()
        self._attempt = 0
        self._is_cut = False
        self._owed: list[int] = []  # ranks here that could not be sent the order yet
        self._is_open = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._steps: dict[int, int] = {}  # by rank: its newest commit when it took the board
        self._ready: dict[int, int] = {}  # by node: the newest step that its ranks are ready for
        self._late: set[int] = set()  # nodes that are ready for nothing that is not cleared
        self._first = self._first_vote = self._cleared = 0
        self._is_frozen = False

    def over(self, nodes: Iterable[int], others: Sequence[ClearedNode]) -> None:
        """Take the numbers of all nodes that have ranks, and the others."""
        self._nodes, self._others = frozenset(nodes), others

    def attach(
        self, later: Later, soon: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        """Look at the lines while ranks wait.

        Args:
            later: calls something after so many seconds.
            soon: calls something once the other nodes were sent what they were told.
        """
        self._later, self._soon = later, soon or _at_once
        self._node.attach(later, lambda: False, lambda _: self._look())

    # --- opening --------------------------------------------------------------------------------

    def open(self, attempt: int, registered: Collection[int], *, is_cut: bool) -> None:
        """Have all ranks wait for clearances, once all are there; called again and again.

        ``is_cut``: ranks hold different parts of the state.
        """
        if not (self._is_open and (self._is_cut or not is_cut)):
            if len(registered) < self._count:
                return
            if self._is_open:  # they turned out to be no replicas: all answer once more
                self._steps.clear()
            self._attempt, self._is_cut, self._is_open = attempt, is_cut, True
            self._owed = sorted(registered)
        order = protocol.OpenVote(is_over_nodes=True, is_cut=self._is_cut)
        elsewhere = [rank for rank in self._owed if rank not in self._here]
        here = [rank for rank in self._owed if rank in self._here]
        self._owed = [rank for rank in here if not self._node.hand(rank, order)]
        self._links.send_all(elsewhere, order)  # by one call: they may be thousands

    def hear(self, message: protocol.VoteOpened) -> None:
        """A rank waits for clearances from now on, or does not."""
        if message.why_not or message.is_cut != self._is_cut:
            return
        self._steps[message.rank] = message.step
        if len(self._steps) == self._count:
            self._first = max(self._steps.values()) + AHEAD
            self._first_vote = self._first if self._is_cut else 0
            self._journal.event("ClearanceBegan", step=self._first, is_cut=self._is_cut)
            self._pass_on()

    # --- while ranks train ----------------------------------------------------------------------

    def ready_here(self, rank: int, step: int) -> int:
        """A rank of this node is ready; what all are ready for, if that is news, else 0."""
        return self._node.ready(rank, step)

    def ready(self, node: int, attempt: int, step: int) -> None:
        """What the ranks of a node alone hold is elsewhere, as of this step.

        Said again: they wait for others.
        """
        if attempt != self._attempt or not self._is_open:
            return
        if step <= self._ready.get(node, 0):
            self._look()
        else:
            self._ready[node] = step
            self._late.discard(node)
            self._clear()

    def freeze(self) -> None:
        """A freeze is ordered: nothing more is cleared."""
        self._tell_here()  # the others are told this before they are told to freeze
        self._is_frozen = True

    def go_on(self) -> None:
        """Ranks train on."""
        self._is_frozen = False
        self._clear()

    def _clear(self) -> None:
        if self._is_frozen or not self._first or self._late or len(self._ready) < len(self._nodes):
            return
        self._cleared = min(self._ready.values())
        self._late = {node for node, step in self._ready.items() if step <= self._cleared}
        self._pass_on()

    def _look(self) -> None:
        """Say whether a line is in doubt, to all: what is said shows that at the next look."""
        if self._later is None or self._has_looked:
            return
        self._has_looked = True
        self._later(LOOK_S / 2, self._forget_look)
        doubts = [node.is_in_doubt() for node in self._others]
        self._pass_on(is_in_doubt=any(doubts))

    def _forget_look(self) -> None:
        self._has_looked = False

    def _pass_on(self, *, is_in_doubt: bool = False) -> None:
        from agent.nodes.run_messages import UpdatesCleared  # a job of one node starts without it

        numbers = self._attempt, self._first, self._first_vote, self._cleared
        message = UpdatesCleared(*numbers, is_in_doubt)
        for node in self._others:
            node.clear(message)
        # the ranks here are told last: if this node is lost in between, they would have made an
        # update of which the others have not heard
        self._untold = message
        self._soon(self._tell_here)

    def _tell_here(self) -> None:
        message, self._untold = self._untold, None
        if message is not None:
            self._node.take(message)

    def close(self) -> None:
        """The attempt is over, or some of its ranks are replaced: they get a new board."""
        self._is_open, self._owed, self._untold = False, [], None
        self._begin_anew()
        self._node.close()


def _at_once(act: Callable[[], None]) -> None:
    act()
