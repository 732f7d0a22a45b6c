"""What the store knows of a job: who controls it, in which term, and its will. Pure."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, NamedTuple

NO_TERM = ""  # there is no store, or it does not count
_MOST_DIGITS = 18
_MOST_CHARS = 4096  # of a record: the store may hold anything


class StoreError(Exception):
    """The store does not answer, or with what nobody understands: a verb phrase about it."""


class Seat(NamedTuple):
    """Who controls the job, and where other nodes find it."""

    job: str  # the id of the run
    host: str
    address: str
    port: int
    pid: int


class Will(NamedTuple):
    """What is left of a job whose controller is gone, for who begins it again."""

    job: str  # by this id its checkpoints are known
    nodes: int
    saved: str = ""  # the newest checkpoint that is known; empty: none


class HeldSeat(NamedTuple):
    """The seat as this process has it."""

    term: str  # no other one is the same, ever
    lease: str = ""  # empty: this process only knows of the term


class SeatRecord(NamedTuple):
    """What was found in the store."""

    term: str = NO_TERM  # empty: nobody has ever had the seat
    seat: Seat | None = None  # None: it is free
    will: Will | None = None

    @property
    def who(self) -> str:
        """Who has the seat, as text."""
        if self.seat is None:
            return "another node, which is gone"
        return f"{self.seat.host} ({self.seat.address}:{self.seat.port})"


class NodeShare(Enum):
    """How many of the nodes that may live are on this side of a silence."""

    FEW = "less than half"
    HALF = "exactly half"
    MOST = "more than half"

    @staticmethod
    def of(here: int, alive: int) -> NodeShare:
        """That of so many of so many."""
        if 2 * here == alive:
            return NodeShare.HALF
        return NodeShare.MOST if 2 * here > alive else NodeShare.FEW


def packed(record: Seat | Will) -> str:
    """A record as text."""
    return json.dumps(record._asdict(), separators=(",", ":"))


def seat_of(text: str) -> Seat | None:
    """The seat in a text; ``None``: there is none that makes sense."""
    found = _fields(text)
    try:
        seat = Seat(**found)
        is_whole = 0 < seat.port < 1 << 16 and seat.pid > 0
    except TypeError:
        return None
    texts = (seat.job, seat.host, seat.address)
    is_plain = all(isinstance(each, str) and each.isprintable() for each in texts)
    return seat if is_whole and is_plain and seat.address else None


def will_of(text: str) -> Will | None:
    """The will in a text; ``None``: there is none that makes sense."""
    try:
        will = Will(**_fields(text))
        is_whole = will.nodes > 0
    except TypeError:
        return None
    is_plain = all(isinstance(each, str) and each.isprintable() for each in (will.job, will.saved))
    return will if is_whole and is_plain else None


def next_term(term: str, unique: str) -> str:
    """The term after this one; nobody else makes the same of ``unique``."""
    number = term.partition("-")[0]
    is_number = number.isdecimal() and len(number) < _MOST_DIGITS
    return f"{int(number) + 1 if is_number else 1}-{unique}"


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text[:_MOST_CHARS])
    except ValueError:
        return {"": None}
    return found if isinstance(found, dict) else {"": None}
