"""Copies of small nested state, fast enough to be made at every step."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

FIXED = frozenset({float, int, bool, str, bytes, complex, type(None)})
"""Types whose values never change in place."""


class NotSavableError(RuntimeError):
    """What would be saved is not the state of a step; the text says why, for users."""


class UnreadableState(NamedTuple):
    """Placeholder for a piece whose state could not be read."""

    error: str


def copied(value: Any, *, clone: bool = True) -> Any:
    """A copy that later changes in place do not affect.

    ``clone``: copy tensors, too; else the copy refers to the same tensors.
    """
    kind = value.__class__
    if kind in FIXED:
        return value
    if kind in {dict, OrderedDict, Counter, defaultdict}:
        pairs = value.copy()
        for key, each in pairs.items():
            if each.__class__ not in FIXED:
                pairs[key] = copied(each, clone=clone)
        return pairs
    if kind is list:
        return [each if each.__class__ in FIXED else copied(each, clone=clone) for each in value]
    if kind is tuple:
        if is_constant(value):
            return value
        return tuple([copied(each, clone=clone) for each in value])
    if isinstance(value, Tensor):
        return value.detach().clone() if clone else value
    return copy.deepcopy(value)


def is_constant(value: Any) -> bool:
    """Whether neither the value nor anything in it can change in place."""
    return value.__class__ in FIXED or (
        value.__class__ is tuple and FIXED.issuperset([each.__class__ for each in value])
    )


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    found: list[Tensor] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, dict):
            waiting += [inner for inner in each.values() if inner.__class__ not in FIXED]
        elif isinstance(each, list | tuple):
            waiting += [inner for inner in each if inner.__class__ not in FIXED]
    return found


def put(tensors: Mapping[str, Tensor], name: str, target: Tensor) -> None:
    """Copy one of some tensors into another one; read from a file without a copy in new memory."""
    reader = getattr(tensors, "put", None)
    if reader is not None:
        reader(name, target)
    else:
        target.copy_(tensors[name])


def version(tensor: Tensor) -> int:
    """How often the tensor was changed in place; torch does not count writes through ``.data``."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  torch has no public one
