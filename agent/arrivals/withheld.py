"""What ranks that train already tell a controller that is new to them: all that lives comes first.

A death counts for less once it is known who else holds the state. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from agent.controller import events as ev
from worker_hooks.contract import protocol

FAILURES = ev.WorkerExited | ev.StartFailed | ev.RankUnreachable | protocol.Raised


class WithheldFailures:
    """Failures are decided on once all nodes have told what their ranks hold."""

    def __init__(self, post: Callable[[ev.Event], None]) -> None:
        """Nothing is withheld before :meth:`begin`; ``post`` decides on an event."""
        self._post = post
        self._untold: set[Hashable] = set()
        self._events: list[ev.Event] = []

    def begin(self, nodes: Iterable[Hashable]) -> None:
        """These nodes have yet to tell."""
        self._untold = set(nodes)

    def post(self, event: ev.Event) -> None:
        """Decide on an event, now or later."""
        if self._untold and isinstance(event, FAILURES):
            self._events.append(event)
        else:
            self._post(event)

    def told(self, node: Hashable) -> None:
        """A node has told all, or is lost."""
        self._untold.discard(node)
        if not self._untold:
            self.release()

    def release(self) -> None:
        """Wait no longer."""
        self._untold.clear()
        events, self._events = self._events, []
        for event in events:
            self._post(event)
