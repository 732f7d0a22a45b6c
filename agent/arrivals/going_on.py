"""Whether node 0 goes on though nodes are silent: it is outvoted, or a store is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from agent.arrivals.places import LostPlaces
from agent.controller.states import JobState
from agent.nodes.run_messages import NodeFacts
from agent.seat.records import HeldSeat, NodeShare
from agent.seat.rights import TellTerm
from agent.seat.tenure import Tenure

OUTVOTED = "more than half of the nodes are silent, and may go on without this one"


class HowItEnded(Protocol):
    """How the job has ended here."""

    @property
    def state(self) -> JobState:
        """At its end."""

    @property
    def is_to_end(self) -> bool:
        """Whether somebody has asked for it."""


class OtherNode(Protocol):
    """Another node, as far as it is told of the seat."""

    facts: NodeFacts

    def know_term(self, told: TellTerm) -> None:
        """Tell it which term counts."""


class GoingOn:
    """Finds out on node 0 whether the job may go on there as nodes fall silent."""

    def __init__(
        self,
        places: LostPlaces,
        tenure: Tenure | None,
        go_on: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        """No node is lost yet.

        Args:
            places: of lost nodes.
            tenure: of the seat; ``None``: there is no store.
            go_on: gives other nodes these places.
            give_up: awaits no other node, because of this.
        """
        self._places = places
        self._tenure = tenure
        self._go_on = go_on
        self._tell_outvoted = give_up
        self.is_outvoted = False
        """Whether other nodes may go on without this one, so this one does not."""

    def gives_way(self, ending: HowItEnded) -> bool:
        """Whether the job has failed here because others may go on with it."""
        is_failed = ending.state is JobState.FAILED
        return self.is_outvoted and is_failed and not ending.is_to_end

    def _give_up(self, why: str) -> None:
        self.is_outvoted = True
        self._tell_outvoted(why)

    @property
    def held(self) -> HeldSeat | None:
        """The seat, if this node has it."""
        return None if self._tenure is None else self._tenure.held

    def attach(self, loop: Any, others: Mapping[int, OtherNode]) -> None:
        """Begin.

        Args:
            loop: msrun's.
            others: by their ranks.
        """
        self._loop = loop
        if self._tenure is None:
            return

        def tell(node: NodeFacts, told: TellTerm) -> None:
            if others[node.rank].facts == node:
                others[node.rank].know_term(told)

        self._tenure.attach(loop, tell)
        for node in others.values():
            self._tenure.came(node.facts)

    def came(self, node: NodeFacts) -> None:
        """A node has got a lost one's place."""
        if self._tenure is not None:
            self._tenure.came(node)

    def knows(self, node: NodeFacts, number: int) -> None:
        """A node has heard which term counts."""
        if self._tenure is not None:
            self._tenure.knows(node, number)

    def lost(self, node: NodeFacts, *, has_hooks: bool, is_silent: bool) -> None:
        """A node is lost; only where ranks can save their state may other nodes go on with it."""
        if self._tenure is not None:
            self._tenure.lost(node, is_silent=is_silent)
        if not has_hooks:
            return
        share = self._places.standing(self._loop.time())
        if share is NodeShare.FEW:
            self._give_up(OUTVOTED)
        elif self._tenure is not None and self._places.vacant:
            self._places.is_in_doubt = True
            self._tenure.judge(share, self._on_seat, self._give_up)

    def _on_seat(self) -> None:
        self._places.is_in_doubt = False
        self._loop.call_soon(self._go_on)  # not while a node is being lost

    def close(self, *, goes_on: bool, is_done: bool, saved: str) -> None:
        """The job is over; as :meth:`Tenure.close`."""
        if self._tenure is not None:
            self._tenure.close(goes_on=goes_on, is_done=is_done, saved=saved)
