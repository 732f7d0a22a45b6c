"""What ranks that train already tell a controller that is new to them: all that lives comes first.

A death counts for less once it is known who else holds the state. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from agent.controller import events as ev
from worker_hooks.contract import protocol

FAILURES = ev.WorkerExited | ev.StartFailed | ev.RankUnreachable | protocol.Raised


def _nothing() -> None:
    """Nobody is to hear that all have told."""


class WithheldFailures:
    """Failures are decided on once all nodes have told what their ranks hold."""

    def __init__(self, post: Callable[[ev.Event], None]) -> None:
        """Nothing is withheld before :meth:`begin`; ``post`` decides on an event."""
        self._post = post
        self._untold: set[Hashable] = set()
        self._events: list[ev.Event] = []
        self._told_all: Callable[[], object] = _nothing

    def begin(
        self, nodes: Iterable[Hashable], told_all: Callable[[], object] | None = None
    ) -> None:
        """These nodes have yet to tell; ``told_all`` is called then, before anything is decided."""
        self._untold, self._told_all = set(nodes), told_all or _nothing

    def post(self, event: ev.Event) -> None:
        """Decide on an event, now or later."""
        if self._untold and isinstance(event, FAILURES):
            self._events.append(event)
        else:
            self._post(event)

    def told(self, node: Hashable) -> None:
        """A node has told all, or is lost."""
        if node in self._untold:
            self._untold.discard(node)
            if not self._untold:
                self.release()

    def release(self) -> None:
        """Wait no longer."""
        self._untold.clear()
        told_all, self._told_all = self._told_all, _nothing
        told_all()
        events, self._events = self._events, []
        for event in events:
            self._post(event)
