"""Who takes the part of a lost node 0 while the ranks of all other nodes live on. Pure.

Nobody votes: all nodes but the lost one have to come to the same one, and the lost one has to be
known to have ended. So there can be no two that decide, as each would need all. Whatever else is
the case (another node is lost as well, one is silent, or has begun to save) is left to the meeting
of nodes that have saved their step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from agent.nodes.line import Loss, LossKind
from agent.nodes.messages import Join, LivingRanks
from agent.nodes.roster import Doors
from agent.nodes.run_messages import NodeFacts

HEAD = "head"  # among what all nodes are told: the place of the node that decides, if that is not 0
PATIENCE_S = 3.0  # from the loss, until all nodes must have come; ranks wait longer for notes
LONGEST_S = PATIENCE_S + 1.0  # the same for the nodes that wait to hear of it


def why_not_awaited(
    loss: Loss, nodes: Collection[NodeFacts], own: int, lost: int, *, is_calm: bool, is_fixed: bool
) -> str:
    """Why ranks do not wait for another controller, but save their step; empty: they wait.

    Args:
        loss: of the line to the last one's node. Who is only silent may be alive.
        nodes: of the job.
        own: this node's place.
        lost: the last one's.
        is_calm: the job runs, nobody has asked for its end, and no rank waits for an order.
        is_fixed: the job keeps its number of nodes.
    """
    if loss.kind is not LossKind.PROOF:
        return "it may be alive"
    if not is_calm:
        return "an order of it may not have been carried out"
    if not is_fixed:
        return "the job may go on with fewer nodes"
    if not all(each.door for each in nodes) or not {own, lost} <= {each.rank for each in nodes}:
        return "not every node can be found"
    return ""


class Successors:
    """The search of one node that has lost the controller's."""

    def __init__(self, own: int, lost: int, nodes: Iterable[int]) -> None:
        """``nodes``: of the job, by their places."""
        self._own = own
        self._lost = lost
        self._before = sorted(each for each in nodes if each < own and each != lost)

    @property
    def doors(self) -> set[int]:
        """The nodes at whose doors is to be knocked."""
        return {self._lost, *self._before}

    def look(self, doors: Doors) -> int | None:
        """The node to go to, perhaps this one; ``None``: look again.

        It is the first that is there. Whether it may decide is its business.
        """
        for node in self._before:
            if node not in doors.gone:
                return node if node in doors.open else None
        return self._own if self._lost in doors.gone else None


class Takeover:
    """Knows who has to come to the node that is to decide, and when it may begin."""

    def __init__(self, living: LivingRanks, lost: int, nodes: Iterable[int]) -> None:
        """Nobody has come yet.

        Args:
            living: what this node knows of the ranks; the others have to know the same.
            lost: the place of the node whose part it would take.
            nodes: of the job, by their places.
        """
        self._living = living
        self._lost = lost
        self._others = frozenset(nodes) - {lost}

    def is_member(self, join: Join) -> bool:
        """Whether a node is one of those that have to come."""
        told, own = join.living, self._living
        if told is None or join.node_rank != told.node_rank or told.node_rank not in self._others:
            return False
        known = (told.job, told.attempt, told.program, told.world)
        return known == (own.job, own.attempt, own.program, own.world)

    def missing(self, here: Collection[Join]) -> set[int]:
        """The nodes that have not come yet."""
        come = {each.node_rank for each in here if self.is_member(each)}
        return set(self._others) - come

    def awaited(self, here: Collection[Join]) -> set[int]:
        """The nodes at whose doors is to be knocked."""
        return {self._lost} | self.missing(here)

    def may_begin(self, here: Collection[Join], doors: Doors) -> bool:
        """Whether this node decides from now on."""
        return self._lost in doors.gone and not self.missing(here)

    def is_in_vain(self, here: Collection[Join], doors: Doors) -> bool:
        """Whether it never may."""
        return self._lost in doors.open or bool(doors.gone & self.missing(here))


def swapped(nodes: tuple[NodeFacts, ...], first: int) -> tuple[NodeFacts, ...]:
    """The nodes with ``first`` in the first place, and the one that has that in its place.

    So all nodes agree who has node 0's part, if they meet again.
    """
    places = {0: first, first: 0}
    moved = (each._replace(rank=places.get(each.rank, each.rank)) for each in nodes)
    return tuple(sorted(moved, key=lambda each: each.rank))
