"""Whether a job of ``--nnodes=MIN:MAX`` goes on with more or with fewer nodes. Pure.

Its ranks save their step and end, the nodes meet again, and all go on from that step.
"""

from __future__ import annotations


class Resize:
    """Plans at most one change of a job's size; the present run ends with it."""

    def __init__(self, least: int, most: int, nodes: int) -> None:
        """A job of so many nodes now; ``least``: 0: it keeps them."""
        self._least = least
        self._most = most
        self._nodes = nodes
        self.request = ""
        """Why ranks were asked to exit: nodes have come; empty: they were not."""
        self.expected = 0
        """The nodes with which it is to go on; 0: it does not."""

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
        self.request = f"{who} {have} come: the job goes on with {self.expected} nodes"
        return self.request

    def shrink(self, left: int, why_not: str = "") -> str:
        """Nobody takes the place of a lost node: what that means for the size, as a clause.

        ``why_not``: why the job keeps its size in any case; empty: it does not.
        """
        if not 0 < self._least <= left:
            return ""
        if why_not:
            return f"the job keeps its size, as {why_not}"
        self.expected = left
        return f"the job goes on with {left} node{'' if left == 1 else 's'}"

    def goes_on(
        self, *, is_done: bool, is_saved: bool, asked: str, is_stopped_by_signal: bool
    ) -> bool:
        """Whether the run that has ended is gone on with.

        Args:
            is_done: it has come to its end.
            asked: the first reason why it was asked to exit; empty: it was not.
        """
        is_ours = asked in {"", self.request}
        is_to_end = is_done or is_stopped_by_signal
        return bool(self.expected) and is_saved and is_ours and not is_to_end
