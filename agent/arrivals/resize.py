"""Whether a job of ``--nnodes=MIN:MAX`` goes on with more or with fewer nodes. Pure.

Its ranks save their step and end, the nodes meet again, and all go on from that step.
"""

from __future__ import annotations


class Resize:
    """Plans one change of a job's size; the present run ends with it.

    That nodes come, or that nobody takes a lost one's place, begins at most one; while it is under
    way any number of nodes may leave.
    """

    def __init__(self, least: int, most: int, nodes: int) -> None:
        """A job of so many nodes now; ``least``: 0: it keeps them."""
        self._least = least
        self._most = most
        self._nodes = nodes
        self.request = ""
        """Why ranks were asked to exit: nodes have come, or leave; empty: they were not."""
        self.expected = 0
        """The nodes with which it is to go on; 0: it does not."""
        self.leaving: set[int] = set()
        """The nodes without which it is to go on, as they were asked to end; by their places."""

    @property
    def is_elastic(self) -> bool:
        """Whether the job may have different numbers of nodes."""
        return self._least > 0

    @property
    def has_room(self) -> bool:
        """Whether the job may have one node more."""
        return self.is_elastic and self._nodes < self._most

    def grow(self, comers: list[str]) -> str:
        """Take in these nodes, as many as there is room for: why the ranks are to exit now.

        Empty: they are not.
        """
        if self.expected or not comers or not self.has_room:
            return ""
        taken = comers[: self._most - self._nodes]
        self.expected = self._nodes + len(taken)
        who = " and ".join((", ".join(taken[:-1]), taken[-1])) if taken[1:] else taken[0]
        have = "have" if taken[1:] else "has"
        self.request = f"{who} {have} come: {goes_on_with(self.expected)}"
        return self.request

    def shrink(self, left: int, why_not: str = "") -> str:
        """Nobody takes the place of a lost node: what that means for the size, as a clause.

        ``why_not``: why the job keeps its size in any case; empty: it does not.
        """
        if self.leaving or not 0 < self._least <= left:
            return ""  # the run ends already
        if why_not:
            return f"the job keeps its size, as {why_not}"
        self.expected = left
        return goes_on_with(left)

    def leave(self, node: int, name: str, stay: int, comers: int = 0) -> str:
        """A node is asked to end: why the job does not go on without it, as a clause.

        Empty: it does, and :attr:`request` says so.

        Args:
            node: its place.
            name: the same for people.
            stay: how many nodes are there that do not leave, without this one.
            comers: how many wait to be taken in. They dial again as soon as the run has ended: one
                on which nobody counted would have the place of a node that stays.
        """
        if node in self.leaving:
            return ""
        if not self.is_elastic:
            return "it has a fixed number of nodes"
        if not stay:
            return "no other node would be left"
        left = min(self._most, stay + comers)
        if left < self._least:
            nodes = f"{left} node{'' if left == 1 else 's'}"
            return f"{nodes} would be left, and it needs {self._least} at least"
        as_well = " as well" if self.leaving else ""
        self.leaving.add(node)
        self.expected = left
        self.request = f"{name} leaves{as_well}: {goes_on_with(left)}"
        return ""

    def settle(self, stay: int, comers: int) -> None:
        """The run has ended: so many that stay are there by now, and so many wait to be taken in.

        Nodes may be lost, and others may come, while ranks save their step.
        """
        if self.expected:
            self.expected = min(self._most, stay + comers) if stay else 0

    def goes_on(self, *, is_done: bool, is_saved: bool, is_to_end: bool) -> bool:
        """Whether the run that has ended is gone on with.

        Args:
            is_done: it has come to its end.
            is_saved: its newest step is.
            is_to_end: somebody has asked for its end.
        """
        return bool(self.expected) and is_saved and not (is_done or is_to_end)


def goes_on_with(nodes: int) -> str:
    """A clause."""
    return f"the job goes on with {nodes} node{'' if nodes == 1 else 's'}"
