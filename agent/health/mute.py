"""Finds other nodes whose msrun says nothing though its machine answers: it is stopped, or hangs.

A node says something each second while ranks live there. One that does not cannot be told anything,
and what its ranks write to their pages stays there: whoever waits for it would wait for ever. The
kernel of such a machine answers, so no line is silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from agent.health.heartbeats import WOKEN_S
from agent.nodes.line import CALM, LIMIT_S
from agent.nodes.link import NodeLink
from agent.nodes.run_messages import NodeFacts
from agent.text.wording import duration
from agent.workers.worker import Worker

LOOK_S = 1.0
LATE_S = 0.5  # a look that is so late says nothing: perhaps this process could not hear
MUTE_S = 1.3
"""Behind that much without a word a node is in doubt: it says something each second."""


class SpeakingNode(Protocol):
    """Another node."""

    facts: NodeFacts
    workers: dict[int, Worker]

    @property
    def name(self) -> str:
        """For people."""

    @property
    def line(self) -> NodeLink:
        """To it."""


def is_mute(node: SpeakingNode, limit_s: float, since_s: float = 0.0) -> bool:
    """Whether a node has said nothing for so long, though ranks live there.

    ``since_s``: what was not heard before that counts for nothing, monotonic.
    """
    if min(node.line.mute_s(), time.monotonic() - since_s) < limit_s:
        return False
    return any(worker.is_alive for worker in node.workers.values())


class MuteNodes:
    """Of one job; it looks from :meth:`attach` to :meth:`close`."""

    def __init__(
        self,
        nodes: Sequence[SpeakingNode],
        say: Callable[[str], None],
        lose: Callable[[Any, str], None],
        is_calm: Callable[[], bool],
        limit_s: float = LIMIT_S,
    ) -> None:
        """Look at nobody yet.

        Args:
            nodes: the others.
            say: prints one sentence for people.
            lose: a node counts as lost, and why.
            is_calm: whether the job just trains.
            limit_s: after which a node that others wait for counts as lost.
        """
        self._nodes = nodes
        self._say = say
        self._lose = lose
        self._is_calm = is_calm
        self._limit_s = limit_s
        self._said: set[int] = set()  # by their place among the nodes
        self._since_s = self._due_s = self._due_real_s = 0.0
        self._woken_s = -WOKEN_S
        self._timer: Any = None

    def attach(self, loop: Any) -> None:
        """Look on ``loop``, while there are others."""
        self._loop = loop
        if self._nodes:
            self._look_later()

    def close(self) -> None:
        """The job is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        self._due_s = time.monotonic() + LOOK_S
        self._due_real_s = _real_s() + LOOK_S
        self._timer = self._loop.call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self.look()
        self._look_later()

    @property
    def was_stopped(self) -> bool:
        """Whether this process was stopped for long until a moment ago: others may have noticed."""
        now_s = _real_s()
        return now_s > self._due_real_s + self._limit_s / 2 or now_s < self._woken_s + WOKEN_S

    def look(self) -> None:
        """Say which nodes are mute, unless that was said, and lose those that are for too long."""
        now_s = time.monotonic()
        if (real_s := _real_s()) > self._due_real_s + self._limit_s / 2:
            self._woken_s = real_s
        if now_s > self._due_s + LATE_S:
            self._since_s = now_s
        is_calm = self._is_calm()
        for at, node in enumerate(self._nodes):
            if not is_mute(node, self._limit_s / 2, self._since_s):
                self._said.discard(at)
                continue
            is_awaited = not is_calm or now_s < node.line.doubted_s + LOOK_S
            limit_s = self._limit_s if is_awaited else CALM * self._limit_s
            if is_mute(node, limit_s, self._since_s):
                node.line.catch_up()
                if is_mute(node, limit_s, self._since_s):
                    self._lose(node, f"has said nothing for {duration(limit_s)}")
            elif at not in self._said:
                self._said.add(at)
                self._say(
                    f"{node.name} answers, but its msrun has said nothing for "
                    f"{duration(self._limit_s / 2)}: if it is stopped, continue it there (kill "
                    f"-CONT {node.facts.pid}); after {duration(limit_s)} the node counts as lost"
                )


def _real_s() -> float:
    """Seconds that pass while the machine sleeps, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
