"""Copies of the state that are made where a loop ends, and kept until the next commit.

Between two loops scripts exchange weights for their average and validate with that, prune weights,
or set momentum to zero. Ranks that wait in such a validation, for one that has died, hold the
commit in nothing but these copies. Nobody knows beforehand what a script will change, so as much is
copied as costs little; what was seen to be changed, always.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from time import perf_counter

import torch
from torch import Tensor

from worker_hooks.changes.content import nbytes
from worker_hooks.changes.copies import SHARE, has_room
from worker_hooks.device import devices
from worker_hooks.tensors.tensor_bytes import plain

log = logging.getLogger("msrun")

COPIED_ANYWAY = 64 << 20  # bytes that are copied however short the loop was: 30 ms
_RATE = 1e9  # bytes per second, before any were copied

LARGE = (
    "a death between two loops, where %s is changed, loses all steps since the last checkpoint: "
    "%.1f GB of copies have no room in memory"
)


class LoopEndCopies:
    """Only the main thread calls it."""

    def __init__(self) -> None:
        self._since = perf_counter()  # the last copies were made
        self._rate = _RATE
        self._exchanged: set[str] = set()  # seen to be changed between two loops
        self._has_said = False

    def note_exchanged(self, names: Collection[str]) -> None:
        """These were changed between two loops."""
        self._exchanged.update(names)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor], weights: AbstractSet[str]) -> dict[str, Tensor]:
        """Copy all of these; if that takes too long, weights; else what is known to be exchanged.

        The script makes such copies of its own of what it exchanges, so one more costs little. On
        an accelerator that is all there is room for.

        Args:
            tensors: what has no copy yet, by name.
            weights: the names of what scripts exchange most, and of others.
        """
        began = perf_counter()
        budget = max(COPIED_ANYWAY, SHARE * (began - self._since) * self._rate)
        kinds = [tensors.keys(), tensors.keys() & (weights | self._exchanged)]
        if not all(map(devices.is_on_host, tensors.values())):
            kinds = []
        fitting = (each for each in kinds if nbytes(tensors[name] for name in each) <= budget)
        names = next(fitting, tensors.keys() & self._exchanged)
        wanted = {name: each for name, each in tensors.items() if name in names}
        size = nbytes(wanted.values())
        on_host = nbytes(each for each in wanted.values() if devices.is_on_host(each))
        copies = _copied(wanted) if wanted and has_room(on_host) else {}
        if not copies:
            self._say_refused(wanted.keys(), size)
            return copies
        self._since = perf_counter()
        if size > COPIED_ANYWAY:
            self._rate = size / (self._since - began)
        return copies

    def _say_refused(self, names: AbstractSet[str], size: int) -> None:
        if (known := self._exchanged & names) and not self._has_said:
            self._has_said = True
            log.warning(LARGE, min(known), size / 1e9)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies by name, complete when this returns; none, if there is no memory."""
    sources = {name: plain(each) for name, each in tensors.items()}
    try:
        copies = {name: torch.empty_like(each) for name, each in sources.items()}
        torch._foreach_copy_(list(copies.values()), list(sources.values()))
        for device in devices.devices_of(copies.values()):
            torch.accelerator.synchronize(device)
    except (RuntimeError, MemoryError):
        return {}
    return copies
