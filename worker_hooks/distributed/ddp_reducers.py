"""The DDPs that reduce a script's gradients: in the same order after a resume as before.

When a DDP is constructed, it broadcasts every parameter and buffer of rank 0, which takes time in
proportion to the model. After a resume all ranks have just loaded the same state, so the broadcast
would change only buffers, which are restored later. Either all ranks skip it, or none does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.parallel import distributed

from worker_hooks.distributed import ddp_bucket_order
from worker_hooks.distributed.module_flags import REDUCED

JOINED = (
    "with join() ranks that have fewer batches stop before the others, so steps are not in common"
)


class Reducers:
    """The DDPs around some modules: looked up after the first step, or before it after a resume."""

    def __init__(self, modules: Callable[[], list[nn.Module]]) -> None:
        """``modules`` returns the registered ones; DDPs may wrap them until the first step."""
        self._modules = modules
        self._found: list[Any] | None = None
        self._expected: Sequence[list[int] | None] = ()  # the orders in the checkpoint
        self.is_expecting = False  # the first step after a resume is still to come
        self._had_none_at: int | None = None  # the count of DDPs when there was none before
        self._has_uneven_ranks = False  # and that was said
        self._is_final = False
        self._made = 0  # DDPs in this process, when they were looked up

    @property
    def has_learned(self) -> bool:
        """Whether nothing is left to :meth:`learn`: the order is final, and there is no new DDP."""
        return self._is_final and self._made == REDUCED.count

    def orders(self) -> list[list[int] | None]:
        """The orders from which the layouts of the next step follow. Any thread may call this."""
        if self.is_expecting:  # before the first step: those of the checkpoint
            return list(self._expected)
        return [ddp_bucket_order.ready_order(one) for one in self._found or ()]

    def forget(self) -> list[ref[Any]]:
        """Drop all DDPs: the training function that made them was left.

        Returns:
            Those that still exist. None of them reduces gradients any more.
        """
        found, self._found = self._found, None
        self._is_final = False
        new = self._forget_new()
        if found is None:
            found = ddp_bucket_order.find_all(self._modules(), new, is_over=True)
        for one in found:
            ddp_bucket_order.unhook(one)
        return [ref(one) for one in found]

    def expect(self, orders: Sequence[list[int] | None], *, are_none: bool = False) -> None:
        """The state of a checkpoint was put back; its DDPs had these orders.

        ``are_none``: there is no DDP yet, so the process need not be searched for them.
        """
        self._expected, self.is_expecting = orders, True
        trust(self._modules())
        self._forget_new()
        if are_none:
            REDUCED.watch()
            self._had_none_at = REDUCED.count

    def rehearse(self) -> None:
        """Lay the buckets out as they were in the checkpoint. A collective."""
        trust(())
        new = self._forget_new()
        if self._expected:
            self._found, self._made = ddp_bucket_order.find_all(self._modules(), new), REDUCED.count
            self._is_final = False
            for one, order in zip(self._found, self._expected, strict=False):
                ddp_bucket_order.rehearse(one, order)
        self.is_expecting = False

    def learn(self) -> str:
        """See in which order gradients become ready. Called at every commit.

        Returns:
            Why a resumed training could not reduce in this order, said once; empty: it can.
        """
        if self._found is None or self._made != REDUCED.count:
            self._found, self._made = ddp_bucket_order.find_all(self._modules()), REDUCED.count
        whys = [ddp_bucket_order.learn(one) for one in self._found]
        if not self._has_uneven_ranks and any(map(_is_joined, self._found)):
            self._has_uneven_ranks = True
            whys.append(JOINED)
        self._is_final = all(map(ddp_bucket_order.is_settled, self._found))
        return next(filter(None, whys), "")

    def _forget_new(self) -> list[Any] | None:
        """All DDPs, if it is known when there was none; it does not count any more."""
        count, self._had_none_at = self._had_none_at, None
        return None if count is None else REDUCED.made_since(count)


def _is_joined(ddp: Any) -> bool:
    """Whether ranks may have different counts of batches; by a private name of torch."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


_equal: tuple[ref[nn.Module], ...] = ()  # weak: the script may drop its modules
_is_watched = False


def trust(modules: Iterable[nn.Module]) -> None:
    """The parameters of these modules, and only these, are equal on all ranks from now on.

    A DDP around a module with any other parameter broadcasts as usual.
    """
    global _equal, _is_watched  # noqa: PLW0603  what it wraps is global, too
    _equal = tuple(map(ref, modules))
    if not _is_watched and hasattr(distributed, "_sync_module_states"):  # private to torch
        _is_watched = True
        distributed._sync_module_states = _skipping(distributed._sync_module_states)  # noqa: SLF001


def _skipping(sync: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(sync)
    def skipping(module: nn.Module, *args: Any, **options: Any) -> None:
        if not _is_equal(module):
            sync(module, *args, **options)

    return skipping


def _is_equal(module: nn.Module) -> bool:
    if not _equal:
        return False
    living = [each for one in _equal if (each := one()) is not None]
    known = {id(parameter) for each in living for parameter in each.parameters()}
    return all(id(parameter) in known for parameter in module.parameters())
