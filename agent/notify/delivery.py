"""One way of telling: a bounded queue, and a thread. Runs in the courier."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

QUEUED = 64  # notices; more are left out
LAST_S = 3.0  # for what is queued at the end of the job


class Delivery:
    """A queue, and the thread that works through it."""

    def __init__(
        self, name: str, deliver: Callable[[Mapping[str, Any]], str], say: Callable[[str], None]
    ) -> None:
        """``deliver`` takes a notice and returns why it failed, or an empty text."""
        self._name = name
        self._deliver = deliver
        self._say = say
        self._queue: queue.Queue[Mapping[str, Any] | None] = queue.Queue(QUEUED)
        self._has_failed = self._is_full = False  # each is said once
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def put(self, notice: Mapping[str, Any] | None) -> None:
        """Queue a notice; ``None``: there are no more."""
        try:
            self._queue.put(notice, timeout=LAST_S if notice is None else 0)
        except queue.Full:
            if not self._is_full:
                self._is_full = True
                self._say(f"{self._name} is too slow: events are left out")

    def _run(self) -> None:
        while (notice := self._queue.get()) is not None:
            try:
                why = self._deliver(notice)
            except Exception as error:  # noqa: BLE001  one odd event must not end all deliveries
                why = repr(error)
            if why and not self._has_failed:
                self._has_failed = True
                self._say(f"{self._name} failed for event {notice['event']}: {why}; said once")
