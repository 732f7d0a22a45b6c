"""Finds, on another node, that the controller's msrun is stopped though its machine answers.

Nobody would clear an update, or replace a rank. All other nodes hear the same of it, and so give it
up at the same moment, as if its machine were silent: their ranks save their step together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any

from agent.health.mute import LOOK_S, MUTE_S
from agent.health.signs_of_life import SAY_S
from agent.nodes.line import LIMIT_S
from agent.nodes.link import NodeLink
from agent.nodes.run_messages import NodeFacts
from agent.text.wording import duration

LEAST_S = 0.01  # between two looks
LEAST_SAID_S = 1.5 * SAY_S  # a word is missing by then


class MuteController:
    """Of one node; it looks from :meth:`attach` to :meth:`close`."""

    def __init__(
        self,
        line: NodeLink,
        say: Callable[[str], None],
        lose: Callable[[str], None],
        patience: Callable[[], float],
        who: Callable[[], NodeFacts | None],
        limit_s: float = LIMIT_S,
    ) -> None:
        """Do not look yet.

        Args:
            line: to the controller's node; it may be opened anew meanwhile.
            say: prints one sentence for people.
            lose: that node counts as lost, and why.
            patience: how many times the limit it may say nothing.
            who: the controller's node; ``None``: not known.
            limit_s: ``--node-timeout``.
        """
        self._line = line
        self._say = say
        self._lose = lose
        self._patience = patience
        self._who = who
        self._limit_s = limit_s
        self._has_said = False
        self._heard_s = self._due_s = 0.0
        self._not_before_s = 0.0  # it is not given up: it may have spoken unheard
        self._timer: Any = None

    def attach(self, loop: Any) -> None:
        """Look on ``loop``; called again: the line is another one."""
        self.close()
        self._loop = loop
        self.hear()
        self._look_later()

    def hear(self) -> None:
        """It says that it is there, to all nodes at the same moment."""
        self._heard_s = time.monotonic()

    def close(self) -> None:
        """Nobody waits for it any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_later(self) -> None:
        is_mute = self._mute_s() > self._limit_s / 2
        left_s = self._most_s - self._mute_s() if is_mute else inf
        look_s = max(LEAST_S, left_s) if 0 < left_s < LOOK_S else LOOK_S
        self._due_s = time.monotonic() + look_s
        self._timer = self._loop.call_later(look_s, self._look_again)

    def _look_again(self) -> None:
        now_s = time.monotonic()
        if now_s > self._due_s + SAY_S:  # this machine was stopped as well, and its kernel perhaps
            self._not_before_s = now_s + 2 * SAY_S
        self._look_later()
        self.look()

    @property
    def _most_s(self) -> float:
        return self._limit_s * self._patience()

    def _mute_s(self) -> float:
        """How long it has not said that it is there."""
        return time.monotonic() - self._heard_s

    def is_in_doubt(self) -> bool:
        """Whether the machine does not answer, or its msrun says nothing; asked while ranks wait.

        Then node 0 is asked five times a second, so a word is missing soon.
        """
        return self._line.is_in_doubt() or self._line.mute_s() > MUTE_S

    def look(self) -> None:
        """Say that it is mute, unless that was said, and lose it if it is for too long."""
        said_s = max(self._limit_s / 2, LEAST_SAID_S)
        if self._mute_s() >= said_s:
            self._line.catch_up()
        if self._mute_s() < said_s:
            self._has_said = False
        elif self._mute_s() >= self._most_s:
            if time.monotonic() >= self._not_before_s:
                self._lose(f"has said nothing for {duration(self._most_s)}")
        elif not self._has_said:
            self._has_said = True
            who = self._who()
            name = "the controller's node" if who is None else f"node {who.rank} ({who.host})"
            how = "" if who is None else f" (kill -CONT {who.pid})"
            then = "nothing is decided until then"
            if self._most_s < inf:
                then = f"after {duration(self._most_s)} the node counts as lost"
            self._say(
                f"{name} answers, but its msrun has said nothing for "
                f"{duration(said_s)}: if it is stopped, continue it there{how}; {then}"
            )
