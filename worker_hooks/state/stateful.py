"""A registered object of which only ``state_dict`` and ``load_state_dict`` are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from worker_hooks.state.mismatch import missing
from worker_hooks.state.snapshot import copied, tensors_in, version
from worker_hooks.tensors import state_json
from worker_hooks.tensors.placements import is_distributed
from worker_hooks.tensors.state_json import Json

SMALL_BYTES = 64 << 10
"""A state with at most this size of tensors is copied at each commit."""


_NONE: dict[str, Tensor] = {}


class HeldTensor(NamedTuple):
    """The state of an object at a commit; a large one with the object's own tensors."""

    state: Any
    is_large: bool


class ObjectPiece:
    """Anything with ``state_dict`` and ``load_state_dict``; also an optimizer that overrides them.

    The state of an optimizer is compared between replicas. That of another object, such as a meter,
    may differ between ranks: each rank keeps a small one beside its own values, too.
    """

    modules: tuple[torch.nn.Module, ...] = ()

    def __init__(self, name: str, thing: Any) -> None:
        self.name = name
        self._thing = thing
        self.is_compared = isinstance(thing, Optimizer)
        self.optimizers = _optimizers_of(thing)
        self._held: HeldTensor | None = None
        self._tensors: dict[str, Tensor] | None = None  # of what is held, if it is large

    @property
    def held(self) -> HeldTensor:
        """The state at the newest commit."""
        return self._held if self._held is not None else self.snapshot()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a large state, as the object returned them at the commit."""
        held = self.held
        if not held.is_large:
            return _NONE
        if self._tensors is None:
            self._tensors = state_json.encode(held.state, self.name)[1]
        return self._tensors

    def snapshot(self) -> HeldTensor:
        """A copy of the state; the tensors of a large one are not copied."""
        state = self._thing.state_dict()
        nbytes = sum(tensor.nbytes for tensor in tensors_in(state))
        is_large = nbytes > SMALL_BYTES
        self._held, self._tensors = HeldTensor(copied(state, clone=not is_large), is_large), None
        return self._held

    def marks(self) -> Any:
        """The state as text, and the versions of its tensors."""
        text, tensors = state_json.encode(self._thing.state_dict(), self.name)
        return text, [version(tensor) for tensor in tensors.values()]

    def small(self, title: str) -> tuple[Json, dict[str, Tensor]] | None:
        """The present state as JSON and tensors; ``None``: these are large, or not in host memory.

        ``title``: what the names of the tensors begin with.

        Raises:
            TypeError: something cannot be saved without pickle.
        """
        if self._held is not None and self._held.is_large:  # it most likely still is
            return None
        state = self._thing.state_dict()
        tensors = tensors_in(state)
        are_here = all(each.is_cpu and not is_distributed(each) for each in tensors)
        is_small = sum(tensor.nbytes for tensor in tensors) <= SMALL_BYTES
        return state_json.encode(state, title) if are_here and is_small else None

    def is_of(self, thing: object) -> bool:
        """Whether this is the object, or one that it holds as an attribute."""
        held = getattr(self._thing, "__dict__", {})
        return thing is self._thing or any(each is thing for each in held.values())

    def load(self, state: Any) -> None:
        """Put a state back with ``load_state_dict``."""
        self._held = self._tensors = None
        self._thing.load_state_dict(state)

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
        """Put the state back with ``load_state_dict``."""
        self.load(state_json.decode(value, tensors))


class RankObjects:
    """Registered objects that may differ between ranks, by name."""

    def __init__(self, pieces: Iterable[Any]) -> None:
        """``pieces``: all that are registered."""
        objects = (each for each in pieces if isinstance(each, ObjectPiece))
        self._pieces = {each.name: each for each in objects if not each.is_compared}

    def names(self) -> list[str]:
        """Of all of them."""
        return [*self._pieces]

    def small(self, name: str, title: str) -> tuple[Json, dict[str, Tensor]] | None:
        """As :meth:`ObjectPiece.small`."""
        return self._pieces[name].small(title)

    def is_of(self, name: str, thing: object) -> bool:
        """Whether this is the object, or one that it holds as an attribute."""
        return self._pieces[name].is_of(thing)

    def load(self, name: str, state: Any) -> None:
        """Put a state back."""
        self._pieces[name].load(state)


def _optimizers_of(thing: Any) -> tuple[Optimizer, ...]:
    """The optimizer whose steps are to be watched: the object itself, or the one it wraps."""
    if isinstance(thing, Optimizer) and "_optimizer_step_pre_hooks" in vars(thing):
        return (thing,)
    inner = getattr(thing, "optimizer", None)
    return (inner,) if isinstance(inner, Optimizer) else ()
