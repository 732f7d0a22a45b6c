"""The seat of one job in the store: read, taken, renewed and left. Each call is bounded, and waits.

Whoever changes the term has the seat: the store does so for one, however many ask. So which of two
halves goes on depends on no clock; that the seat is under a lease only says who is there.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from agent.seat.records import (
    NO_TERM,
    HeldSeat,
    Seat,
    SeatRecord,
    Will,
    next_term,
    packed,
    seat_of,
    will_of,
)

if TYPE_CHECKING:
    from agent.seat.etcd import Etcd

TTL_S = 10  # without a word of who has the seat, until it counts as free


class SeatStore:
    """Reads and writes the seat of one job."""

    def __init__(self, etcd: Etcd, name: str, ttl_s: int = TTL_S) -> None:
        """Nothing is asked yet.

        Args:
            etcd: the store.
            name: of the job, the same on all nodes.
            ttl_s: of the lease.
        """
        self._etcd = etcd
        self._ttl_s = ttl_s
        self._keys = [f"/msrun/{name}/{each}" for each in ("term", "seat", "will")]
        self._tried: dict[str, str] = {}  # terms that this process has asked for: leases

    def look(self) -> SeatRecord:
        """What is known of the job.

        Raises:
            StoreError: the store does not answer.
        """
        return _record(self._etcd.read(self._keys))

    def take(
        self, own: Seat, will: Will, after: str = NO_TERM, *, if_free: bool = False
    ) -> HeldSeat | SeatRecord:
        """Begin a term.

        Args:
            own: who has the seat then.
            will: of the job.
            after: the term before. Empty: whichever it is, if the seat is free.
            if_free: only if nobody has the seat.

        Returns:
            The seat, or why not: what the store holds.

        Raises:
            StoreError: the store does not answer. It may have done what it was asked for: then the
                next try finds that out.
        """
        term, seat, _ = self._keys
        known = self.look()
        if known.term in self._tried and known.term != after:  # the answer was lost
            return HeldSeat(known.term, self._tried[known.term])
        if after not in {NO_TERM, known.term}:
            return known
        if (if_free or after == NO_TERM) and known.seat is not None:
            return known
        new, lease = next_term(known.term, secrets.token_hex(6)), self._etcd.grant(self._ttl_s)
        self._tried[new] = lease
        expected: dict[str, str | None] = {term: known.term or None}
        if if_free or after == NO_TERM:
            expected[seat] = None
        found = self._etcd.swap(expected, self._all(new, own, will, lease))
        there = None if found is None else self.look()
        # another of its servers may have done it, whose answer was lost
        return HeldSeat(new, lease) if there is None or there.term == new else there

    def renew(self, held: HeldSeat) -> bool:
        """Whether the seat was still held, and is for another while.

        Raises:
            StoreError: the store does not answer.
        """
        is_held = bool(held.lease) and self._etcd.renew(held.lease) and self._has(held)
        if not is_held:
            self._tried.pop(held.term, None)
        return is_held

    def note(self, held: HeldSeat, will: Will) -> None:
        """Keep another will, if the seat is held.

        Raises:
            StoreError: the store does not answer.
        """
        term, _, key = self._keys
        self._etcd.swap({term: held.term}, {key: (packed(will), "")})

    def leave(self, held: HeldSeat, *, is_over: bool) -> None:
        """Free the seat; ``is_over``: nothing is left of the job.

        Raises:
            StoreError: the store does not answer.
        """
        term, seat, _ = self._keys
        self._etcd.swap({term: held.term}, {}, self._keys if is_over else [seat])

    def _has(self, held: HeldSeat) -> bool:
        term, seat = self._etcd.read(self._keys[:2])
        return term == held.term and seat is not None

    def _all(self, new: str, own: Seat, will: Will, lease: str) -> dict[str, tuple[str, str]]:
        term, seat, key = self._keys
        return {term: (new, ""), seat: (packed(own), lease), key: (packed(will), "")}


def _record(values: list[str | None]) -> SeatRecord:
    term, seat, will = (each or "" for each in values)
    return SeatRecord(term, seat_of(seat), will_of(will))
