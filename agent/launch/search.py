"""Whom a node meets that has lost node 0. Pure: it is told what came of knocking, and the time.

The first node that is left gathers the others; all others join it. If node 0 is there after all, or
was started again, they meet at node 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import islice

from agent.nodes.roster import Doors, NodeZeroBackError
from agent.spec.job_spec import NotStartedError

FIRST = 0  # the node that is lost
HOME = -1  # where the nodes met first: somebody may have started node 0 there again
LEAD = -2  # instead of a node: this one gathers the others
MOST_DIALS = 3  # of what listens where node 0 did, and says nothing
MOST_KNOCKED = 3  # nodes before this one, at once
REFUSED_S = 10.0  # until a job that is another one, or does not answer, is asked again
NOBODY_S = 3.0  # that a spare node goes on looking though all others are gone


class AloneError(NotStartedError):
    """A node does not go on without all others."""

    def __init__(self) -> None:
        super().__init__("the job is over, or all of its other nodes are lost")


class Search:
    """The search of one node."""

    def __init__(
        self,
        own: int,
        addresses: Collection[int],
        now_s: float,
        *,
        is_spare: bool,
        is_silent: bool,
        is_mute: bool = False,
    ) -> None:
        """Begin.

        Args:
            own: the rank that the node had in the job.
            addresses: the nodes that it would find, :data:`HOME` too where that is another place.
            now_s: monotonic.
            is_spare: it was in no roster, and has nothing to go on from.
            is_silent: node 0 may be alive.
            is_mute: its machine answers, its msrun does not.
        """
        self._own = own
        self._is_spare = is_spare
        self._others = {rank for rank in addresses if rank not in {own, HOME}}
        self._passed: set[int] = set()  # gone; of FIRST and HOME: somebody else is there
        self._silent: set[int] = set()  # of those before this one
        # of FIRST and HOME: another job is there, so node 0 is not; when that was seen
        self._refused: dict[int, float] = {}
        self._fruitless: Counter[int] = Counter()  # dials of what listens, and does not answer
        self._unanswered: dict[int, float] = {}  # of FIRST and HOME: that is so; as of when
        if is_mute:
            self._fruitless[FIRST] = MOST_DIALS - 1
            self.unanswered(FIRST, now_s)
        self._needs_others = is_spare or is_silent
        self._alone_since_s = now_s
        self._is_first_dead = False  # it was seen to be gone: who is there now was started again

    def candidates(self) -> set[int]:
        """Whose doors are to be knocked at: of thousands of nodes only a few."""
        if self._is_spare:
            return {HOME, *self._others}
        away = self._passed | self._silent
        before = (rank for rank in range(FIRST + 1, self._own) if rank not in away)
        return {HOME, FIRST, *self._silent, *islice(before, MOST_KNOCKED)}

    def look(self, doors: Doors, now_s: float) -> int | None:
        """The node to join, :data:`LEAD`, or ``None``: look again.

        ``doors``: what came of knocking at the candidates'. ``now_s``: monotonic.

        Raises:
            AloneError: this node does not go on alone.
        """
        self._is_first_dead |= FIRST in doors.gone
        self._forget(doors, now_s)
        self._check(doors.gone, now_s)
        there = min(doors.open - self._passed, default=None)
        # node 0 may be started again, the others do not come back
        self._passed |= doors.gone - {FIRST, HOME}
        self._silent = set(doors.silent - {FIRST, HOME})
        is_first_away = FIRST in doors.gone | doors.silent | self._passed
        return LEAD if there is None and is_first_away and self._is_next() else there

    def gather(
        self, doors: Doors, now_s: float, *, is_seated: bool = False, are_enough: bool = False
    ) -> Doors:
        """What counts of the doors while this node gathers the others.

        Args:
            doors: of those that are awaited, of :data:`FIRST` and :data:`HOME`.
            now_s: monotonic.
            is_seated: a store says that this node goes on: node 0 does not, if it still lives.
            are_enough: so do these nodes: what listens there, and does not answer, is let alone.

        Raises:
            NodeZeroBackError: node 0 is there.
            AloneError: this node does not go on alone.
        """
        self._is_first_dead |= FIRST in doors.gone
        if are_enough:
            self._unanswered = dict.fromkeys(self._unanswered, now_s)
        if is_seated and not self._is_first_dead:
            left = doors.open & {FIRST, HOME}
            doors = doors._replace(open=doors.open - left, silent=doors.silent | (left & {FIRST}))
        self._forget(doors, now_s)
        if (doors.open & {FIRST, HOME}) - self._passed:
            raise NodeZeroBackError
        mute = self._unanswered.keys() & {FIRST}
        doors = doors._replace(open=doors.open - mute, silent=doors.silent | mute)
        doors = doors._replace(gone=doors.gone | (self._refused.keys() & {FIRST}))
        self._check(doors.gone, now_s)
        return doors

    def unanswered(self, node: int, now_s: float) -> None:
        """Dialling this one came to nothing."""
        self._fruitless[node] += 1
        if node in {FIRST, HOME} and self._fruitless[node] >= MOST_DIALS:
            self._passed.add(node)  # it may live: it is not known to be gone
            self._unanswered[node] = now_s

    @property
    def is_first_mute(self) -> bool:
        """Whether somebody listens where node 0 did, and has not answered."""
        return self._fruitless[FIRST] >= MOST_DIALS

    def refused(self, node: int, now_s: float) -> bool:
        """Node 0, or what is in its place, does not take this node; whether the search goes on."""
        if node not in {FIRST, HOME} or self._is_spare:
            return False
        self._passed.add(node)
        self._refused[node] = now_s
        return True

    def _forget(self, doors: Doors, now_s: float) -> None:
        """Another job was at node 0's port, and is there no more."""
        over = (doors.gone | doors.silent) & {FIRST, HOME}
        # one that has ended and begun anew at once was never seen to be gone
        over |= {rank for rank, at_s in self._refused.items() if at_s + REFUSED_S < now_s}
        for rank in over:
            self._refused.pop(rank, None)
            self._unanswered.pop(rank, None)
            del self._fruitless[rank]
        # one that was stopped may have been continued, and go on with others
        again = {rank for rank, at_s in self._unanswered.items() if at_s + REFUSED_S < now_s}
        self._passed -= over | again
        for rank in again:
            del self._unanswered[rank]

    def _check(self, gone: frozenset[int], now_s: float) -> None:
        """What was silent may have gone on without this node, and come to its end.

        A spare one has nothing to go on from.
        """
        if not (self._needs_others and self._others <= gone):
            self._alone_since_s = now_s
        elif now_s > self._alone_since_s + NOBODY_S:
            raise AloneError

    def _is_next(self) -> bool:
        """Whether no node before this one is left."""
        before = range(FIRST + 1, self._own)
        return not self._is_spare and (self._passed | self._silent).issuperset(before)
