"""The DDPs that reduce a script's gradients: in the same order after a resume as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from torch import nn

from worker_hooks.distributed import ddp_bucket_order, ddp_sync


class Reducers:
    """Found when the first step is over, or before the first step after a resume."""

    def __init__(self, modules: Callable[[], list[nn.Module]]) -> None:
        """Take the registered modules, which DDPs may wrap at any time before the first step."""
        self._modules = modules
        self._found: list[Any] | None = None
        self._expected: Sequence[list[int] | None] = ()  # orders, of a checkpoint
        self.is_expecting = False  # the first step after a resume
        self._new: ddp_bucket_order.New | None = None  # there were none before these

    def orders(self) -> list[list[int] | None]:
        """What the next step's layouts are made of; any thread may ask."""
        if self.is_expecting:  # whoever dies before the first step leaves what it came from
            return list(self._expected)
        return [ddp_bucket_order.ready_order(one) for one in self._found or ()]

    def forget(self) -> list[ref[Any]]:
        """Be as new: the training function that made them is left.

        Returns:
            Those that there are. None of them reduces anything any more, whoever still has it.
        """
        found, self._found = self._found, None
        new = self._forget_new()
        if found is None:
            found = ddp_bucket_order.find_all(self._modules(), new, is_over=True)
        for one in found:
            ddp_bucket_order.unhook(one)
        return [ref(one) for one in found]

    def expect(self, orders: Sequence[list[int] | None], *, are_none: bool = False) -> None:
        """The state of a checkpoint is put back; DDPs had these orders in it.

        Args:
            orders: one for each DDP.
            are_none: no DDP is made yet, so they need not be looked for in all of the process.
        """
        self._expected, self.is_expecting = orders, True
        ddp_sync.trust(self._modules())
        self._forget_new()
        if are_none:
            self._new = ddp_bucket_order.New()

    def rehearse(self) -> None:
        """Lay the buckets out as they were when the checkpoint was made; a collective."""
        ddp_sync.trust(())
        new = self._forget_new()
        if self._expected:
            self._found = ddp_bucket_order.find_all(self._modules(), new)
            for one, order in zip(self._found, self._expected, strict=False):
                ddp_bucket_order.rehearse(one, order)
        self.is_expecting = False

    def learn(self) -> None:
        """Look in which order gradients become ready; at every commit."""
        if self._found is None:
            self._found = ddp_bucket_order.find_all(self._modules())
        for one in self._found:
            ddp_bucket_order.learn(one)

    def _forget_new(self) -> list[Any] | None:
        """Note no more; those that there are, if that is known."""
        new, self._new = self._new, None
        return None if new is None else new.end()
