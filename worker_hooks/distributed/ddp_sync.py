"""DDP's broadcast of all weights as it is made, left out where they are known to be equal.

On its way in a DDP broadcasts every parameter and buffer of rank 0, which takes as long as the
model is large. After a resume all ranks have put back one and the same state a moment before, so
it would change nothing but buffers, which are put back behind it. All ranks leave it out or none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.parallel import distributed

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
