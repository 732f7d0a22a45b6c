"""What node 0 knows of lost nodes: whose places are free, and whether it may go on itself. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

from agent.nodes.messages import ANY_RANK, SurvivedStep
from agent.nodes.run_messages import NodeFacts
from agent.seat.records import NodeShare

TWO = 2  # nodes, of which each is half
SURE_S = 60.0  # more than others wait for a node: then they have ended, or gone on


class LostPlaces:
    """The places of lost nodes, until another node has each, or none is awaited any more."""

    def __init__(self, nodes: int, wait_s: float) -> None:
        """None is lost yet.

        Args:
            nodes: of the job, this one included.
            wait_s: for another node; 0: none is awaited.
        """
        self._nodes = nodes
        self._wait_s = wait_s
        self.vacant: set[int] = set()
        """The ranks of nodes that are lost, and in whose places others are awaited."""
        self.is_in_doubt = False
        """Whether a store is asked if this node goes on: no place is given away until then."""
        self._silent: set[int] = set()  # of these, nodes that may be alive
        self._haunted: dict[int, float] = {}  # places, and when a node there fell silent last
        self._is_unsure = False  # whether all nodes that may live know of this job
        self._silences: list[float] = []  # when nodes fell silent, also those replaced since

    def lose(self, rank: int, now_s: float, *, is_silent: bool, was_heard: bool = True) -> None:
        """A node is lost.

        Args:
            rank: its place.
            now_s: monotonic.
            is_silent: it may be alive.
            was_heard: in this job. Else it may not know of it, and go on with the one before.
        """
        if self._wait_s:
            self._is_unsure |= is_silent and not was_heard
            self.vacant.add(rank)
            if is_silent:
                self._silent.add(rank)
                self._haunted[rank] = now_s
                self._silences.append(now_s)

    def settle(self, rank: int) -> None:
        """Another node has the place, or none is awaited any more."""
        self.vacant.discard(rank)
        self._silent.discard(rank)

    def is_haunted(self, rank: int, now_s: float) -> bool:
        """Whether a node that had this place may live, and go on with nodes of its time.

        One of two does not: without a store it has ended, with one it has asked that.
        """
        silent_s = self._haunted.get(rank)
        is_sure = silent_s is None or silent_s < now_s - self._wait_s - SURE_S
        return not is_sure and self._nodes > TWO

    def standing(self, now_s: float) -> NodeShare:
        """That of the nodes that are not silent, here. If these are few, the others may go on.

        Exactly half of them may with a store alone.
        """
        alive = self._nodes - len(self.vacant - self._silent)
        self._forget(now_s)
        if self._is_unsure:
            return NodeShare.FEW
        return NodeShare.of(alive - len(self._silences), alive)

    def _forget(self, now_s: float) -> None:
        """One that has been replaced may go on all the same for a while, with others."""
        since_s = now_s - self._wait_s - SURE_S
        self._silences = [each for each in self._silences if each > since_s]

    def place(
        self, facts: Collection[NodeFacts], nproc: int, name: str, node_rank: int = ANY_RANK
    ) -> int | None:
        """The place for a node that has come; ``None``: there is none that fits.

        Args:
            facts: of all nodes, by their ranks.
            name: of its worker; one that was started again has its own place before another's.
            node_rank: the only place that it takes, if that is given.
        """
        fitting = [
            each
            for each in facts
            if each.rank in self.vacant
            and not self.is_in_doubt
            and each.nproc == nproc
            and node_rank in {ANY_RANK, each.rank}
        ]
        found = min(fitting, key=lambda each: (each.name != name, each.rank), default=None)
        return None if found is None else found.rank


class Relation(Enum):
    """What a node that has lost node 0 of a job is, for a job that runs."""

    MEMBER = "it was taken for lost"
    STRANGER = "its job runs another program"
    BEHIND = "its job is older than this one"
    AHEAD = "it has saved what this job was to go on from"


def relation(survived: SurvivedStep, jobs: Iterable[str], program: str, newest: int) -> Relation:
    """What such a node is.

    Args:
        jobs: this job, and those that it resumed.
        newest: the newest step that a rank of it has committed.
    """
    if survived.job in {*jobs}:
        return Relation.MEMBER
    if survived.program != program:
        return Relation.STRANGER
    return Relation.BEHIND if survived.step <= newest else Relation.AHEAD
