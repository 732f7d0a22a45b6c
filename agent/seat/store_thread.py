"""Asks the store in a thread of its own: it may take seconds to answer, or never do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from agent.seat.records import StoreError

T = TypeVar("T")


class StoreThread:
    """One question after the other."""

    def __init__(self) -> None:
        """There is no thread before the first question."""
        self._questions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, question: Callable[[], T], answer: Callable[[T | StoreError], object]) -> None:
        """Ask; ``answer`` takes what came of it, in this thread."""

        def asked() -> None:
            try:
                found: T | StoreError = question()
            except StoreError as error:
                found = error
            answer(found)

        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="store", daemon=True)
            self._thread.start()
        self._questions.put(asked)

    def close(self, within_s: float) -> None:
        """Ask what is left, for so long at most."""
        if self._thread is not None:
            self._questions.put(None)
            self._thread.join(within_s)
            self._thread = None

    def _work(self) -> None:
        while (question := self._questions.get()) is not None:
            question()
