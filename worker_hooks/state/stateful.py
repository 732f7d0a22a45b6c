"""A registered object that only its own ``state_dict`` and ``load_state_dict`` know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from worker_hooks.state.mismatch import missing
from worker_hooks.state.snapshot import copied, tensors_in, version
from worker_hooks.tensors import state_json
from worker_hooks.tensors.state_json import Json

SMALL_BYTES = 64 << 10
"""Up to so many bytes of tensors are copied at each commit."""


class HeldTensor(NamedTuple):
    """The state of an object at a commit. If it is large, the tensors are those it gave out."""

    state: Any
    is_large: bool


class ObjectPiece:
    """Anything with ``state_dict`` and ``load_state_dict``, among them optimizers with their own.

    An optimizer's state is compared between replicas. Another object may be the rank's own, such as
    a meter.
    """

    modules: tuple[torch.nn.Module, ...] = ()

    def __init__(self, name: str, thing: Any) -> None:
        self.name = name
        self._thing = thing
        self.is_compared = isinstance(thing, Optimizer)
        self.optimizers = _optimizers_of(thing)
        self._held: HeldTensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Those of a large state, as the object gave them out at the commit."""
        held = self._held if self._held is not None else self.snapshot()
        return state_json.encode(held.state, self.name)[1] if held.is_large else {}

    def snapshot(self) -> HeldTensor:
        """A copy of the state; of a large one without the tensors."""
        state = self._thing.state_dict()
        nbytes = sum(tensor.nbytes for tensor in tensors_in(state))
        is_large = nbytes > SMALL_BYTES
        self._held = HeldTensor(copied(state, clone=not is_large), is_large)
        return self._held

    def marks(self) -> Any:
        """The state's text, and versions of its tensors."""
        text, tensors = state_json.encode(self._thing.state_dict(), self.name)
        return text, [version(tensor) for tensor in tensors.values()]

    def encode(self, snapshot: HeldTensor) -> tuple[Json, dict[str, Tensor]]:
        """The state as JSON, and the tensors of a small one.

        Raises:
            TypeError: something cannot be saved without pickle.
        """
        value, tensors = state_json.encode(snapshot.state, self.name)
        return value, {} if snapshot.is_large else tensors

    def mismatches(self, like: Mapping[str, Tensor], value: Json) -> list[str]:
        """Why this cannot be restored."""
        return missing(value, like)

    def restore(self, tensors: Mapping[str, Tensor], value: Json) -> None:
        """Put the state back, by the object's own means."""
        self._held = None
        self._thing.load_state_dict(state_json.decode(value, tensors))


def _optimizers_of(thing: Any) -> tuple[Optimizer, ...]:
    """The optimizer whose step is to be watched: the thing itself, or the one it wraps."""
    if isinstance(thing, Optimizer) and "_optimizer_step_pre_hooks" in vars(thing):
        return (thing,)
    inner = getattr(thing, "optimizer", None)
    return (inner,) if isinstance(inner, Optimizer) else ()
