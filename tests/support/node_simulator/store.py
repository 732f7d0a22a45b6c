"""The store of a simulated job, which some nodes reach, and some do not. Not a test itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agent.seat.records import HeldSeat, Seat, SeatRecord
from agent.seat.rights import RenewSeat, TakeSeat
from agent.seat.store import TTL_S

if TYPE_CHECKING:
    from support.node_simulator.msrun import Msrun
    from support.node_simulator.simulation import Simulation

STORE = -1  # its machine
CALL_S = 2.0
ASKED = (TakeSeat, RenewSeat)


class Store:
    """As `SeatStore`: what it was asked it may do though its answer is lost."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.machine = STORE
        self.is_alive = True
        self.term = ""
        self.has: Msrun | None = None
        self._until_s = 0.0  # of the lease
        self._terms: dict[str, Msrun] = {}  # who has begun which
        self._count = 0

    def holder(self, asker: Msrun) -> Msrun | None:
        """Who has the seat, if the store can be asked."""
        if not self.sim.network.reach(asker, self):
            return None
        return self.has if self.sim.clock.now < self._until_s else None

    def ask(self, asker: Msrun, wish: Any, heard: Callable[..., None]) -> None:
        """One question; ``heard`` takes the asker, what happened, and what it is about."""
        clock, rng = self.sim.clock, self.sim.rng
        clock.after(0.1 * rng.random(), self._arrive, asker, wish, heard)

    def leave(self, asker: Msrun, held: HeldSeat) -> None:
        """The seat is free."""
        if self.sim.network.reach(asker, self) and self.term == held.term:
            self._until_s = 0.0

    def _arrive(self, asker: Msrun, wish: Any, heard: Callable[..., None]) -> None:
        if not asker.is_alive:
            return
        reach, clock = self.sim.network.reach, self.sim.clock
        answer: tuple[Any, ...] = ("failed", "does not answer")
        if reach(asker, self):
            done = self._renew(wish) if isinstance(wish, RenewSeat) else self._take(asker, wish)
            if self.sim.rng.random() < 0.95:
                answer = done
        clock.after(CALL_S if answer[0] == "failed" else 0.05, self._answer, asker, heard, answer)

    def _answer(self, asker: Msrun, heard: Callable[..., None], answer: tuple[Any, ...]) -> None:
        if asker.is_alive:
            heard(asker, *answer)

    def _renew(self, wish: RenewSeat) -> tuple[Any, ...]:
        is_held = self.term == wish.held.term and self.sim.clock.now < self._until_s
        if is_held:
            self._until_s = self.sim.clock.now + TTL_S
        return "renewed", is_held

    def _take(self, asker: Msrun, wish: TakeSeat) -> tuple[Any, ...]:
        now = self.sim.clock.now
        if self._terms.get(self.term) is asker and self.term != wish.after and now < self._until_s:
            return "took", HeldSeat(self.term, "1")
        is_free = now >= self._until_s
        fits = self.fits(wish.after)
        if not fits or ((wish.if_free or not wish.after) and not is_free):
            return "refused", self._record(is_free=is_free)
        self._count += 1
        self.term = f"{self._count}"
        self._terms[self.term] = self.has = asker
        self._until_s = now + TTL_S
        self.sim.promises.seated(asker, self.term)
        return "took", HeldSeat(self.term, "1")

    def fits(self, after: str) -> bool:
        return after in {"", self.term}

    def _record(self, *, is_free: bool) -> SeatRecord:
        seat = None if is_free else Seat("", "mn", "10.0.0.1", 1, 1)
        return SeatRecord(self.term, seat)
