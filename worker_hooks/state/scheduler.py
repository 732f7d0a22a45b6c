"""A registered learning rate scheduler: counters and rates, all of them small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from worker_hooks.state.mismatch import missing
from worker_hooks.state.snapshot import FIXED, copied
from worker_hooks.tensors import state_json
from worker_hooks.tensors.state_json import Json


class SchedulerPiece:
    """A scheduler of torch; functions among its attributes are not saved."""

    is_compared = True
    modules: tuple[torch.nn.Module, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    def __init__(self, name: str, scheduler: LRScheduler) -> None:
        self.name = name
        self._scheduler = scheduler
        state = scheduler.state_dict()
        self._functions = [key for key, value in state.items() if callable(value)]
        self._is_plain = type(scheduler).state_dict is LRScheduler.state_dict
        if self._is_plain:  # its state is all attributes but this one
            self._functions.append("optimizer")
        counters = [
            (vars(each), key)
            for each in _chain(scheduler)
            for key in ("last_epoch", "_step_count")
            if key in vars(each)
        ]
        self._holders = [held for held, _ in counters]
        self._keys = [key for _, key in counters]

    def tensors(self) -> dict[str, Tensor]:
        """None: nothing of it is live state."""
        return {}

    def snapshot(self) -> Any:
        """A copy of its state."""
        scheduler = self._scheduler
        state = vars(scheduler).copy() if self._is_plain else scheduler.state_dict()
        for key in self._functions:
            state.pop(key, None)
        for key, value in state.items():
            kind = value.__class__
            if kind is list and FIXED.issuperset(map(type, value)):  # of rates
                state[key] = value[:]
            elif kind not in FIXED:
                state[key] = copied(value)
        return state

    def marks(self) -> Any:
        """The sum of its counters."""
        return sum(map(getitem, self._holders, self._keys))

    def encode(self, snapshot: Any) -> tuple[Json, dict[str, Tensor]]:
        """The state as JSON, and its tensors, if a learning rate is one.

        Raises:
            TypeError: something cannot be saved without pickle.
        """
        return state_json.encode(snapshot, self.name)

    def mismatches(self, like: Mapping[str, Tensor], value: Json) -> list[str]:
        """Why this cannot be restored."""
        return missing(value, like)

    def restore(self, tensors: Mapping[str, Tensor], value: Json) -> None:
        """Put the state back."""
        self._scheduler.load_state_dict(state_json.decode(value, tensors))


def _chain(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """The scheduler and those inside it."""
    yield scheduler
    for each in getattr(scheduler, "_schedulers", ()):
        yield from _chain(each)
