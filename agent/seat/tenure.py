"""Node 0 keeps the seat while a job runs: what its right says is done here."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from agent.machine.file_thread import FileThread
from agent.seat.records import HeldSeat, NodeShare, Seat, SeatRecord, Will
from agent.seat.rights import (
    AGAIN_S,
    DenyPlaces,
    GrantPlaces,
    NodeZeroRight,
    RenewSeat,
    SayOfStore,
    SeatAction,
    TakeSeat,
    TellTerm,
)
from agent.seat.store import SeatStore

LEAVE_S = 3.0  # for the last word to the store

TellNode = Callable[[Any, TellTerm], object]


class Tenure:
    """Keeps the seat of one job, on the controller's node."""

    def __init__(
        self,
        store: SeatStore,
        own: Seat,
        will: Will,
        held: HeldSeat | None,
        say: Callable[[str], None],
    ) -> None:
        """Nothing is asked before :meth:`attach`.

        Args:
            store: of the job.
            own: the seat, as this node would have it.
            will: of the job.
            held: the seat, if this node has it already.
            say: prints one sentence for people.
        """
        self._store = store
        self._own = own
        self._will = will
        self._say = say
        self._right = NodeZeroRight(held, time.monotonic())
        self._verdict: tuple[Callable[[], None], Callable[[str], None]] | None = None
        self._is_over = False

    @property
    def held(self) -> HeldSeat | None:
        """The seat, if this node has it."""
        return self._right.held

    def attach(self, loop: Any, tell: TellNode) -> None:
        """Begin.

        Args:
            loop: msrun's.
            tell: tells a node which term counts.
        """
        self._loop, self._tell = loop, tell
        self._thread = FileThread(loop.call_soon_threadsafe)
        loop.call_soon(self._tick)

    def came(self, node: Hashable) -> None:
        """A node takes part, and can be told something."""
        self._do(self._right.came(node))

    def lost(self, node: Hashable, *, is_silent: bool) -> None:
        """A node is lost."""
        self._right.lost(node, is_silent=is_silent)

    def knows(self, node: Hashable, number: int) -> None:
        """A node has heard what it was told."""
        self._right.knows(node, number)

    def judge(
        self, share: NodeShare, go_on: Callable[[], None], give_up: Callable[[str], None]
    ) -> None:
        """Nodes are lost: one of the two is called once.

        Args:
            share: of this side; not too few.
            go_on: it goes on.
            give_up: it does not; takes why.
        """
        self._verdict = go_on, give_up
        self._do(self._right.judged(share, time.monotonic()))

    def close(self, *, goes_on: bool, is_done: bool, saved: str) -> None:
        """The job is over.

        Args:
            goes_on: as another one, on this node.
            is_done: nothing is left to do.
            saved: the newest checkpoint; empty: none is known.
        """
        self._is_over = True
        held, store = self.held, self._store
        if held is not None and not goes_on:
            will = self._will._replace(saved=saved)
            if saved and not is_done:
                self._thread.do(lambda: store.note(held, will), lambda _: None)
            self._thread.do(lambda: store.leave(held, is_over=is_done), lambda _: None)
        self._thread.close(LEAVE_S)

    def _tick(self) -> None:
        if not self._is_over:
            self._do(self._right.passed(time.monotonic()))
            self._loop.call_later(AGAIN_S, self._tick)

    def _do(self, actions: list[SeatAction]) -> None:
        for action in actions:
            match action:
                case TakeSeat(after=after, if_free=if_free):
                    take = partial(self._store.take, self._own, self._will, after, if_free=if_free)
                    self._ask(take)
                case RenewSeat(held=held):
                    self._ask(partial(self._store.renew, held))
                case TellTerm(nodes=nodes):
                    for node in nodes:
                        self._tell(node, action)
                case SayOfStore(text=text):
                    self._say(text)
                case GrantPlaces() | DenyPlaces():
                    self._judge(action)

    def _judge(self, action: GrantPlaces | DenyPlaces) -> None:
        verdict, self._verdict = self._verdict, None
        if verdict is not None and isinstance(action, DenyPlaces):
            verdict[1](action.why)
        elif verdict is not None:
            verdict[0]()

    def _ask(self, question: Callable[[], bool | HeldSeat | SeatRecord]) -> None:
        self._thread.do(question, self._hear)

    def _hear(self, found: bool | HeldSeat | SeatRecord | Exception) -> None:
        if self._is_over:
            return
        right, now_s = self._right, time.monotonic()
        match found:
            case Exception():
                self._do(right.failed(str(found), now_s))
            case HeldSeat():
                self._do(right.took(found, now_s))
            case SeatRecord():
                self._do(right.refused(found, now_s))
            case _:
                self._do(right.renewed(now_s, is_held=found))
