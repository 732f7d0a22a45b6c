"""Notices a script that updates its optimizers and does not say where a step of it ends.

Its state is given to ``TrainState``, and nothing of it is saved: such a script reads as if it were
protected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

WHY = (
    "the script has not said where a step ends: loop over state.batches(loader), or read "
    "state.should_exit in front of the first step and at the end of each"
)
UPDATES = 3  # of one optimizer
LONG_S = 2.0  # from its first update; a script may try something out before it trains


class UncountedSteps:
    """Watches optimizers until the first step is counted, or it is clear that none will be."""

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], say: Callable[[str], None]
    ) -> None:
        """``say`` is called once, with the reason why nothing is saved."""
        self._say = say
        self._counts: dict[int, int] = {}
        self._began_s = 0.0
        self._handles: list[RemovableHandle] = [
            each.register_step_post_hook(self._updated) for each in optimizers
        ]

    def end(self) -> None:
        """Steps are counted: watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        now_s = time.monotonic()
        if not self._counts:
            self._began_s = now_s
        self._counts[id(optimizer)] = count = self._counts.get(id(optimizer), 0) + 1
        if count >= UPDATES and now_s >= self._began_s + LONG_S:
            self.end()
            self._say(WHY)
