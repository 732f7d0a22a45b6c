"""The node that gathers the others after node 0 was lost asks the store for the seat."""

from __future__ import annotations

import queue
import time
from functools import partial

from agent.machine.file_thread import FileThread
from agent.seat.records import HeldSeat, NodeShare, Seat, SeatRecord, Will
from agent.seat.rights import RenewSeat, SuccessorRight
from agent.seat.store import SeatStore

Answer = bool | HeldSeat | SeatRecord | Exception


class Claim:
    """One node's claim to the seat; the node looks now and then what has come of it."""

    def __init__(
        self, store: SeatStore | None, own: Seat, will: Will, right: SuccessorRight
    ) -> None:
        """Nothing is asked yet.

        Args:
            store: of the job; ``None``: there is none.
            own: the seat, as this node would have it.
            will: of the job.
            right: of this node to it.
        """
        self._store = store
        self._own = own
        self._will = will
        self.right = right
        self._thread = FileThread(lambda answer, found: answer(found))
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def look(self, standing: NodeShare) -> None:
        """Take in what the store has said, and ask again if it is time. Never waits."""
        while not self._answers.empty():
            self._hear(self._answers.get())
        wish, store = self.right.wish(standing, time.monotonic()), self._store
        if wish is None or store is None:
            return
        if isinstance(wish, RenewSeat):
            self._thread.do(partial(store.renew, wish.held), self._answers.put)
        else:
            take = partial(store.take, self._own, self._will, wish.after, if_free=wish.if_free)
            self._thread.do(take, self._answers.put)

    def close(self, *, is_given_back: bool = False) -> None:
        """Ask nothing any more; ``is_given_back``: the nodes meet elsewhere."""
        held, store = self.right.held, self._store
        if is_given_back and held is not None and store is not None:
            self._thread.do(lambda: store.leave(held, is_over=False), lambda _: None)
        self._thread.close(0.0)

    def _hear(self, found: Answer) -> None:
        now_s = time.monotonic()
        match found:
            case Exception():
                self.right.failed(now_s)
            case HeldSeat():
                self.right.took(found, now_s)
            case SeatRecord():
                self.right.refused(found, now_s)
            case _:
                self.right.renewed(now_s)
