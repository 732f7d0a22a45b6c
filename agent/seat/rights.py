"""Who may go on where the nodes of a job do not hear each other, and have a store. Pure.

Without a store node 0 goes on unless more than half of the nodes are silent, and others go on with
more than half: so where exactly half is silent, node 0's half goes on, and if that is dead, none.
With a store it is nobody's right to go on with half, and who begins the next term has it. A node
that was told of no term, or that none counts, never asks.

Both rules are told what happens and answer with what is to be done. The store may be deaf for as
long as it likes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from agent.seat.records import NO_TERM, HeldSeat, NodeShare, SeatRecord

DEAF_S = 10.0  # without an answer, until the store does not count any more
ASK_S = 30.0  # that half of the nodes ask a store that does not answer
MOST_ASK_S = 6.0  # the same of more than half, who may go on in any case
AGAIN_S = 1.0  # from one try to the next

LEFT = "nodes are silent, and the store says that {} goes on"
UNHEARD = "exactly half of the nodes are silent, and the store does not answer: they may go on"


class TakeSeat(NamedTuple):
    """Begin a term."""

    after: str  # the term before; empty: whichever, if the seat is free
    if_free: bool = False


class RenewSeat(NamedTuple):
    """Renew the lease."""

    held: HeldSeat


class TellTerm(NamedTuple):
    """Tell nodes which term counts; empty: none."""

    nodes: tuple[Hashable, ...]
    term: str
    number: int  # of what was told: their answer repeats it


class GrantPlaces(NamedTuple):
    """Give the places of lost nodes away."""


class DenyPlaces(NamedTuple):
    """Never do that."""

    why: str


class SayOfStore(NamedTuple):
    """Tell people, in one sentence."""

    text: str


SeatAction = TakeSeat | RenewSeat | TellTerm | GrantPlaces | DenyPlaces | SayOfStore


class NodeZeroRight:
    """What node 0 does about the store while a job runs."""

    def __init__(self, held: HeldSeat | None, now_s: float) -> None:
        """Begin.

        Args:
            held: the seat, if this node has it from before.
            now_s: monotonic.
        """
        self.held = held
        self._told = NO_TERM if held is None else held.term  # the newest that anyone may know
        self._present: dict[Hashable, None] = {}
        # those that may ask the store: they were told of a term, and have not said since that they
        # know that none counts
        self._believers: set[Hashable] = set()
        self._silent: set[Hashable] = set()  # of these
        self._since_s: float | None = None  # since it is asked, and does not answer
        self._next_s = now_s
        self._is_open = False  # a question to it
        self._why = "does not answer"  # the store, as it said last
        self._number = 0  # of what nodes were told last
        self._begun_s = now_s
        self._asked_s: float | None = None  # for the right to give places away
        self._share = NodeShare.MOST  # of this side then
        self._is_said = False  # that it does not count
        self._is_taken = False  # somebody else has the seat

    def came(self, node: Hashable) -> list[SeatAction]:
        """A node takes part."""
        self._present[node] = None
        return self._tell((node,)) if self.held is not None else []

    def lost(self, node: Hashable, *, is_silent: bool) -> None:
        """A node is lost; ``is_silent``: it may be alive."""
        self._present.pop(node, None)
        if is_silent and node in self._believers:
            self._silent.add(node)
        self._believers.discard(node)

    def knows(self, node: Hashable, number: int) -> None:
        """A node has heard what it was told with this number."""
        if number == self._number and self.held is None:
            self._believers.discard(node)

    def judged(self, share: NodeShare, now_s: float) -> list[SeatAction]:
        """Whether this side may go on, that is half of the nodes that may live, or more.

        A silent node may ask for the next term as long as that has not begun, for a half of its
        own; so it begins before another node has its place. More than half waits a moment for that.
        """
        if not self._silent:
            return [GrantPlaces()]
        self._share, self._asked_s, self._next_s = share, now_s, now_s
        return self.passed(now_s)

    def passed(self, now_s: float) -> list[SeatAction]:
        """Time has passed; call it every second or so."""
        found = self._deaf(now_s)
        if self._asked_s is not None and self._share is NodeShare.MOST:
            if now_s > self._asked_s + MOST_ASK_S:
                self._asked_s = None
                return [*found, GrantPlaces()]
        elif self._asked_s is not None and now_s > self._asked_s + ASK_S:
            self._asked_s = None
            return [*found, DenyPlaces(UNHEARD)]
        if self._is_open or now_s < self._next_s:
            return found
        if self._asked_s is not None:
            return [*found, self._ask(TakeSeat(self._told), now_s)]
        if self.held is not None:
            return [*found, self._ask(RenewSeat(self.held), now_s)]
        # where nobody else can ask any more, whatever was there before does not matter
        after = self._told if self._believers | self._silent else NO_TERM
        return [*found, self._ask(TakeSeat(after), now_s)]

    def failed(self, why: str, now_s: float) -> list[SeatAction]:
        """The store has not answered; ``why``: a verb phrase."""
        self._is_open, self._next_s, self._why = False, now_s + AGAIN_S, why
        return self._deaf(now_s)

    def renewed(self, now_s: float, *, is_held: bool) -> list[SeatAction]:
        """It has renewed the lease, or the seat is lost."""
        self._hear(now_s)
        if not is_held:
            self._next_s = now_s
        if not is_held and self.held is not None:  # it is told of when it has another one
            self.held = None
            return self._tell(tuple(self._present), NO_TERM)
        return []

    def took(self, held: HeldSeat, now_s: float) -> list[SeatAction]:
        """A term has begun: whoever asks for the one after the last one gets nothing."""
        self._hear(now_s)
        self.held, self._told = held, held.term
        self._silent.clear()
        found: list[SeatAction] = []
        if self._is_said or self._is_taken:
            self._is_said = self._is_taken = False
            found.append(SayOfStore("the store counts again"))
        found += self._tell(tuple(self._present))
        if self._asked_s is not None:
            self._asked_s = None
            found.append(GrantPlaces())
        return found

    def refused(self, record: SeatRecord, now_s: float) -> list[SeatAction]:
        """Somebody else has begun one."""
        self._hear(now_s)
        found: list[SeatAction] = []
        was_asked, self._asked_s = self._asked_s is not None, None
        # of a job that was begun again at once the seat is taken for a moment
        if not self._is_taken and (self._told or now_s > self._begun_s + 2 * DEAF_S):
            self._is_taken = True
            why = f"the store says that {record.who} controls this job: it does not count here"
            found.append(SayOfStore(why))
        if self.held is not None:
            self.held = None
            found += self._tell(tuple(self._present), NO_TERM)
        if was_asked:
            found.append(DenyPlaces(LEFT.format(record.who)))
        return found

    def _hear(self, now_s: float) -> None:
        self._is_open, self._since_s, self._next_s = False, None, now_s + DEAF_S / 3

    def _ask(self, action: TakeSeat | RenewSeat, now_s: float) -> SeatAction:
        self._is_open = True
        self._since_s = now_s if self._since_s is None else self._since_s
        return action

    def _deaf(self, now_s: float) -> list[SeatAction]:
        """The store does not count any more, once all others know that."""
        if self._since_s is None or now_s < self._since_s + DEAF_S or self._is_said:
            return []
        self._is_said = True
        found: list[SeatAction] = [SayOfStore(f"the store {self._why}: the job goes on without it")]
        if self.held is not None:
            self.held = None
            found += self._tell(tuple(self._present), NO_TERM)
        return found

    def _tell(self, nodes: tuple[Hashable, ...], term: str | None = None) -> list[SeatAction]:
        told = term if term is not None else self.held.term if self.held else NO_TERM
        if not nodes:
            return []
        self._number += 1
        if told != NO_TERM:
            self._believers.update(nodes)
        return [TellTerm(nodes, told, self._number)]


class SuccessorRight:
    """What the node does about the store that gathers the others, after node 0 was lost."""

    def __init__(self, term: str, *, needs_store: bool = False) -> None:
        """Nothing was asked yet.

        Args:
            term: that this node knows to count; empty: none.
            needs_store: it would have ended without one.
        """
        self.held: HeldSeat | None = None
        self._term = term
        self._needs_store = needs_store
        self._is_open = False
        self._next_s = 0.0
        self._since_s: float | None = None  # since it asks, and the store does not answer
        self._is_deaf = False
        self._left_to = ""  # another one has begun a term

    def wish(self, standing: NodeShare, now_s: float) -> TakeSeat | RenewSeat | None:
        """What is to be asked of the store now; call it every second or so."""
        if self._is_open or now_s < self._next_s or self._term == NO_TERM or self._left_to:
            return None
        if self.held is None and standing is NodeShare.FEW:
            return None
        self._is_open = True
        if self.held is not None:
            return RenewSeat(self.held)
        self._since_s = now_s if self._since_s is None else self._since_s
        return TakeSeat(self._term, if_free=standing is NodeShare.HALF)

    def failed(self, now_s: float) -> None:
        """The store has not answered."""
        self._is_open, self._next_s = False, now_s + AGAIN_S
        self._is_deaf |= self._since_s is not None and now_s > self._since_s + MOST_ASK_S

    def took(self, held: HeldSeat, now_s: float) -> None:
        """A term has begun."""
        self._hear(now_s)
        self.held, self._next_s = held, now_s + DEAF_S / 3

    def renewed(self, now_s: float) -> None:
        """The lease was renewed, or was lost: the term is this node's in any case."""
        self._hear(now_s)
        self._next_s = now_s + DEAF_S / 3

    def refused(self, record: SeatRecord, now_s: float) -> None:
        """The seat is not free, or somebody else has begun a term."""
        self._hear(now_s)
        if record.term != self._term:
            self._left_to = record.who

    def may_go_on(self, standing: NodeShare) -> bool:
        """Whether nodes of this standing may begin the job anew."""
        if self.held is not None:
            return standing is not NodeShare.FEW
        is_silent = self._is_deaf and not self._left_to and not self._needs_store
        return standing is NodeShare.MOST and (self._term == NO_TERM or is_silent)

    def why_not(self, standing: NodeShare) -> str:
        """Why not, as a clause; empty: it is not because of the store."""
        if self._term == NO_TERM or standing is NodeShare.FEW or self.may_go_on(standing):
            return ""
        if self._left_to:
            return f"the store says that {self._left_to} goes on"
        if self._since_s is not None:
            return "the store does not answer"
        return "the store says that node 0 is there, or was a moment ago"

    def _hear(self, now_s: float) -> None:
        self._is_open, self._since_s, self._is_deaf = False, None, False
        self._next_s = now_s + AGAIN_S
