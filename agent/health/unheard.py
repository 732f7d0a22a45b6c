"""Says which other nodes do not answer, once, before they count as lost.

Their kernels answer within a second or two, whatever their msruns do: so a machine is off, very
busy, or a cable is cut. People hear of it while it may still come back by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from agent.nodes.line import LIMIT_S
from agent.nodes.link import NodeLink
from agent.text.wording import duration

LOOK_S = 1.0
LISTED = 4  # nodes named in a sentence


class AskedNode(Protocol):
    """Another node, whose machine answers again and again."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def line(self) -> NodeLink:
        """To it; it knows how long that machine has not answered."""


class UnheardNodes:
    """Of one job; it looks from :meth:`attach` to :meth:`close`."""

    def __init__(
        self, nodes: Sequence[AskedNode], say: Callable[[str], None], limit_s: float = LIMIT_S
    ) -> None:
        """Look at nobody yet.

        Args:
            nodes: the others.
            say: prints one sentence for people.
            limit_s: after which a silent one counts as lost.
        """
        self._limit_s = limit_s
        self._said_s = limit_s / 2  # without an answer
        self._alike_s = 0.3 * limit_s  # what befell one has befallen these, too
        self._nodes = nodes
        self._say = say
        self._said: set[int] = set()  # by their place among the nodes

    def attach(self, loop: Any) -> None:
        """Look on ``loop``, while there are others."""
        self._loop = loop
        self._timer = loop.call_later(LOOK_S, self._look_again) if self._nodes else None

    def close(self) -> None:
        """The job is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_again(self) -> None:
        self.look()
        self._timer = self._loop.call_later(LOOK_S, self._look_again)

    def look(self) -> None:
        """Say which nodes have not answered for long, unless that was said."""
        silent = {at: node.line.unheard_s() for at, node in enumerate(self._nodes)}
        found = {at for at, seconds in silent.items() if seconds > self._alike_s}
        self._said &= found
        if all(silent[at] <= self._said_s for at in found - self._said):
            return
        names = [self._nodes[at].name for at in sorted(found - self._said)]
        self._said |= found
        more = len(names) - LISTED
        who = ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")
        verb, pronoun = ("has", "it counts") if len(names) == 1 else ("have", "they count")
        self._say(
            f"{who} {verb} not answered for {duration(self._said_s)}: after "
            f"{duration(self._limit_s)} "
            f"{pronoun} as lost"
        )
