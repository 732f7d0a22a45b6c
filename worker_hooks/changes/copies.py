"""Copies of the registered tensors that change outside of updates, made at each commit.

Between a commit and the next update such a tensor in live memory is not that of the commit. There
are two copies of each, written in turn, so that the newest commit is complete at any time. They are
replicated state: any survivor has them, so they need not outlive their process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from time import perf_counter

import torch
from torch import Tensor

from worker_hooks.changes.content import nbytes
from worker_hooks.machine.free_memory import free_bytes
from worker_hooks.tensors.tensor_bytes import plain

SHARE = 0.02  # of a step's time that copies may take
FREE_BYTES = 1 << 20  # so much is copied whatever its share is: it takes 0.2 ms
LOOKS = 8  # commits after which the share is known

_MEMORY_SHARE = 0.25  # of the available memory that two copies may take


class CommitCopies:
    """Which tensors are copied, and their copies. Only the main thread calls it."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # to copy at each commit
        self.refused: dict[str, str] = {}  # by name: why it is not copied
        self._slots: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self._spent: deque[float] = deque(maxlen=LOOKS)  # seconds for the copies of each commit
        self._steps: deque[float] = deque(maxlen=LOOKS)  # seconds of each step before it

    def add(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> set[str]:
        """Copy these, too, from the next commit on, if there is memory; which of them were new."""
        new = {name for name in names if name in tensors} - self.names - self.refused.keys()
        if not new:
            return new
        size = 2 * nbytes(tensors[name] for name in new)
        on_host = 2 * nbytes(tensors[name] for name in new if tensors[name].device.type == "cpu")
        if on_host > FREE_BYTES and not has_room(on_host):
            self._refuse(new, f"two copies of {size / 1e9:.1f} GB have no room in memory")
        else:
            self.names |= new
            self._spent.clear()
            self._steps.clear()
        return new

    @torch.no_grad()
    def take(
        self, step: int, tensors: Mapping[str, Tensor], names: Iterable[str]
    ) -> dict[str, Tensor]:
        """Copy these tensors as of this commit; the copies of the commit before stay."""
        began = perf_counter()
        slot = self._slots[step % 2]
        copies, sources = {}, []
        for name in names:
            source = tensors.get(name)
            if source is None:
                continue
            copy = slot.get(name)
            if copy is None or not _is_alike(copy, source):
                try:
                    copy = slot[name] = torch.empty_like(plain(source))
                except (RuntimeError, MemoryError) as error:
                    self._refuse({name} & self.names, f"no memory is left for a copy: {error}")
                    continue
            copies[name] = copy
            sources.append(source)
        try:
            if sources:
                torch._foreach_copy_(list(copies.values()), sources)  # one call
        except RuntimeError as error:
            self._refuse(copies.keys() & self.names, f"they cannot be copied: {error}")
            return {}
        self._spent.append(perf_counter() - began)
        return copies

    @property
    def share(self) -> float:
        """Of a step's time that they take; 0: not known yet."""
        if len(self._spent) < LOOKS or len(self._steps) < LOOKS:
            return 0.0
        return min(self._spent) / sorted(self._steps)[LOOKS // 2]

    def let_go(self, names: Iterable[str]) -> None:
        """Copy these no more, without a reason to refuse them."""
        for name in names:
            self.names.discard(name)
            self.refused.pop(name, None)
        self.drop_others()

    def drop_others(self) -> None:
        """Free the copies of what is not to be copied any more."""
        for slot in self._slots:
            for name in slot.keys() - self.names:
                del slot[name]

    def keep_to_budget(self, step_s: float, tensors: Mapping[str, Tensor]) -> None:
        """Give up the largest tensors if their copies take too much of a step.

        ``step_s``: how long the step took whose commit was copied last.
        """
        self._steps.append(step_s)
        share = self.share
        if not share:
            return
        sizes = sorted((tensors[name].nbytes, name) for name in self.names if name in tensors)
        total = sum(size for size, _ in sizes)
        given_up: set[str] = set()
        left = total
        while sizes and left > FREE_BYTES and share * left / total > SHARE:
            size, name = sizes.pop()
            given_up.add(name)
            left -= size
        if given_up:
            self._refuse(given_up, f"copies at each commit would take {share:.0%} of a step")
            self.drop_others()

    def _refuse(self, names: set[str], why: str) -> None:
        self.names -= names
        self._spent.clear()
        self._steps.clear()
        self.refused.update(dict.fromkeys(names, why))


def has_room(on_host: int) -> bool:
    """Whether copies of so many bytes may be made in host memory."""
    free = free_bytes()
    return free is None or on_host <= _MEMORY_SHARE * free


def _is_alike(copy: Tensor, source: Tensor) -> bool:
    return (
        copy.shape == source.shape and copy.dtype == source.dtype and copy.device == source.device
    )
