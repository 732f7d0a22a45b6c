"""The DDPs that reduce a script's gradients: in the same order after a resume as before.

On construction a DDP broadcasts every parameter and buffer of rank 0, which takes as long as the
model is large. After a resume all ranks have just loaded the same state, so the broadcast would
change only buffers, which are restored after it. All ranks skip it, or none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.parallel import distributed

from worker_hooks.distributed import ddp_bucket_order


class Reducers:
    """Found when the first step is over, or before the first step after a resume."""

    def __init__(self, modules: Callable[[], list[nn.Module]]) -> None:
        """Take the registered modules, which DDPs may wrap at any time before the first step."""
        self._modules = modules
        self._found: list[Any] | None = None
        self._expected: Sequence[list[int] | None] = ()  # orders, of a checkpoint
        self.is_expecting = False  # the first step after a resume
        self._new: ddp_bucket_order.NewDDPs | None = None  # there were none before these

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
        trust(self._modules())
        self._forget_new()
        if are_none:
            self._new = ddp_bucket_order.NewDDPs()

    def rehearse(self) -> None:
        """Lay the buckets out as they were when the checkpoint was made; a collective."""
        trust(())
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


_equal: tuple[ref[nn.Module], ...] = ()  # the last state may never train again

_is_watched = False


def trust(modules: Iterable[nn.Module]) -> None:
    """From now on the parameters of these modules are equal on all ranks, and of no other.

    A DDP of a module with any other parameter broadcasts as ever.
    """
    global _equal, _is_watched  # noqa: PLW0603  as global as what is wrapped
    _equal = tuple(map(ref, modules))
    if not _is_watched and hasattr(distributed, "_sync_module_states"):  # private to torch
        _is_watched = True
        distributed._sync_module_states = _spared(distributed._sync_module_states)  # noqa: SLF001


def _spared(sync: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(sync)
    def spared(module: nn.Module, *args: Any, **options: Any) -> None:
        if not _is_equal(module):
            sync(module, *args, **options)

    return spared


def _is_equal(module: nn.Module) -> bool:
    if not _equal:
        return False
    living = [each for one in _equal if (each := one()) is not None]
    known = {id(parameter) for each in living for parameter in each.parameters()}
    return all(id(parameter) in known for parameter in module.parameters())
