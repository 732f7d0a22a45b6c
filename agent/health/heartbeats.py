"""When a node tells the controller's how far its ranks are: again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BEAT_S = 1.0  # how old what the controller's node knows of the ranks' progress may be
RARE_BEAT_S = 2.5  # the same of many nodes' ranks that wait: less than what counts as old there
MANY_NODES = 256
WOKEN_S = 1.0  # after a stop, until what has happened meanwhile was heard


class Heartbeats:
    """Of one node; they are told from :meth:`attach` until the line is closed."""

    def __init__(
        self, tell: Callable[[], bool], is_rare: Callable[[], bool], limit_s: Callable[[], float]
    ) -> None:
        """Tell nothing yet.

        Args:
            tell: tells them, and says whether they are to be told again.
            is_rare: whether they are told rarely: those of thousands of nodes take as long as a
                replacement.
            limit_s: after which a node that says nothing may count as lost; 0: it does not.
        """
        self._tell = tell
        self._is_rare = is_rare
        self._limit_s = limit_s
        self._timer: Any = None
        self._told_s = 0.0  # when they were told last
        self._woken_s = -WOKEN_S  # when that was too late: this process was stopped
        self._beat_s = BEAT_S

    def attach(self, loop: Any) -> None:
        """Tell them on ``loop``, as if that had just happened."""
        self._loop = loop
        self._told_s = loop.time()
        self._set(self._told_s + BEAT_S)

    def tell(self) -> None:
        """Tell them now."""
        if self.was_stopped:
            self._woken_s = self._loop.time()
        if self._tell():
            self._told_s, self._beat_s = self._loop.time(), self._interval_s
            self._set(self._told_s + self._beat_s)

    def look(self) -> None:
        """They may be rare from now on, or not any more."""
        if self._timer is None or self._beat_s == self._interval_s:
            return
        self._beat_s = self._interval_s
        latest_s = self._told_s + self._beat_s
        # not all nodes at the same moment, if they are late for it
        self._set(max(latest_s, min(self._timer.when(), self._loop.time() + BEAT_S)))

    @property
    def was_stopped(self) -> bool:
        """Whether this process said nothing for so long, a moment ago, that it may be given up."""
        now_s, limit_s = float(self._loop.time()), self._limit_s()
        return 0 < limit_s < now_s - self._told_s or now_s < self._woken_s + WOKEN_S

    @property
    def _interval_s(self) -> float:
        return RARE_BEAT_S if self._is_rare() else BEAT_S

    def _set(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when_s, self.tell)
