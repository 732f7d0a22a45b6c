"""Finds what a registered object works with and its own ``state_dict`` leaves out.

A warm-up that wraps an optimizer, SAM with its ``base_optimizer``, a trainer with an average of the
weights: the object is saved as its class says, so what that does not return begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from worker_hooks.script.values import FIXED
from worker_hooks.tensors.placements import part_of

_DEPTH = 4  # objects within objects
_ITEMS = 64  # of a container in an object
_SAMPLED = 16  # numbers of a tensor
_TORCHS = {*vars(nn.Module())}  # attributes of each module: its parameters, modules, hooks
_NOTHING: Mapping[str, Any] = {}


class Inner(NamedTuple):
    """A registered object, or one within it."""

    name: str  # from the registered one on: ``warm.optimizer``
    thing: Any
    owner: str  # the name of the registered one
    is_part: bool  # a module within a module, which saves it


def registered_objects(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The objects that were given to ``TrainState``, one by one, with the names of their pieces."""
    for name, thing in objects.items():
        if isinstance(thing, dict | list | tuple):
            inside = thing.items() if isinstance(thing, dict) else enumerate(thing)
            yield from registered_objects({f"{name}.{key}": each for key, each in inside})
        else:
            yield name, thing


def attributes(thing: Any) -> Mapping[str, Any]:
    """An object's attributes; none, if it has slots only."""
    try:
        held: Mapping[str, Any] = vars(thing)
    except TypeError:
        return _NOTHING
    return held


def inner_objects(name: str, registered: Any) -> Iterator[Inner]:
    """What a registered object consists of, itself first; not the optimizer of a scheduler."""
    found: dict[int, Any] = {}  # alive, so that their ids stay theirs
    waiting = [(name, registered, 0, False)]
    for path, thing, depth, is_part in waiting:  # which grows
        is_plain = type(thing) in FIXED or isinstance(thing, Tensor | type) or callable(thing)
        if id(thing) in found or (is_plain and not isinstance(thing, nn.Module)):
            continue
        found[id(thing)] = thing
        yield Inner(path, thing, name, is_part)
        if isinstance(thing, dict | list | tuple):
            waiting += [(f"{path}.{key}", each, depth, False) for key, each in _items(thing)]
            continue
        if isinstance(thing, nn.Module):
            inside = list(thing.named_modules())[1:]
            waiting += [(f"{path}.{key}", each, depth, True) for key, each in inside]
        if depth < _DEPTH:
            waiting += [
                (f"{path}.{key}", each, depth + 1, False)
                for key, each in list(attributes(thing).items())
                if not (isinstance(thing, LRScheduler) and key == "optimizer")
                and not (isinstance(thing, nn.Module) and key in _TORCHS)
            ]


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if len(value) <= _ITEMS:
        yield from value.items() if isinstance(value, dict) else enumerate(value)


def is_saved(thing: Any, state: Any) -> bool:
    """Whether a state has that of an object.

    Args:
        thing: a module, or an object with ``state_dict``.
        state: what the ``state_dict`` of another one returned.
    """
    if isinstance(thing, nn.Module):  # state_dict of a sharded one is a collective, and this rank
        own = [*thing.parameters(), *thing.buffers()]  # is alone here
    else:
        mine = thing.state_dict()
        own = list(_tensors_in(mine))
        if not own:
            return any(_has(each, mine) for each in _mappings_in(state))
    saved = list(_tensors_in(state))
    places = {part_of(each).data_ptr() for each in saved}
    copies: dict[Any, list[Tensor]] = {}
    for each in saved:
        copies.setdefault(_sample(each), []).append(each)
    return all(
        part_of(each).data_ptr() in places or _is_among(each, copies.get(_sample(each), []))
        for each in own
    )


def _has(state: Mapping[Any, Any], mine: Mapping[Any, Any]) -> bool:
    keys = [key for key, value in mine.items() if type(value) in FIXED]
    return mine.keys() <= state.keys() and all(state[key] == mine[key] for key in keys)


def _sample(tensor: Tensor) -> Any:
    """What two tensors have in common if they are equal: most others are not read in full."""
    with torch.no_grad():
        numbers = part_of(tensor).reshape(-1)
        some = numbers[:: max(1, len(numbers) // _SAMPLED)]
        return tensor.dtype, tensor.shape, tuple(some.tolist())


def _is_among(tensor: Tensor, others: list[Tensor]) -> bool:
    with torch.no_grad():
        mine = part_of(tensor).cpu()
        return any(torch.equal(mine, part_of(each).cpu()) for each in others)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(each)


def _mappings_in(value: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(value, Mapping):
        yield value
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _mappings_in(each)
