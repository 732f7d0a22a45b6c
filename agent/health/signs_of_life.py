"""Says to all other nodes, again and again, that the controller's msrun is not stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from agent.nodes.messages import StillThere

SAY_S = 2.0
STILL_THERE = StillThere()  # always the same: its frame is made once


class AssuredNode(Protocol):
    """Another node of the job."""

    def pass_on(self, message: StillThere) -> None:
        """Tell it, unless it is lost."""


class SignsOfLife:
    """Of one job; they are given from :meth:`attach` to :meth:`close`."""

    def __init__(
        self, nodes: Sequence[AssuredNode], tell_spares: Callable[[StillThere], object]
    ) -> None:
        """Say nothing yet.

        Args:
            nodes: the others.
            tell_spares: tells it the nodes that wait for a place.
        """
        self._nodes = nodes
        self._tell_spares = tell_spares
        self._timer: Any = None

    def attach(self, loop: Any) -> None:
        """Say it on ``loop``: a msrun that hangs does not say it either."""
        self._loop = loop
        self._timer = loop.call_later(SAY_S, self._say)

    def close(self) -> None:
        """The job is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _say(self) -> None:
        for node in self._nodes:
            node.pass_on(STILL_THERE)
        self._tell_spares(STILL_THERE)
        self._timer = self._loop.call_later(SAY_S, self._say)
