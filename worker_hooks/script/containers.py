"""Lists, tuples and dicts that hold objects of the script's own: one meter for each loss, say."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable
from itertools import islice
from operator import is_
from typing import Any

import torch

from worker_hooks.script.watch import is_object

MOST = 64
"""A container of more objects holds data; what changes in them is not looked for."""

_DICTS = {dict, OrderedDict, defaultdict}
CONTAINERS = frozenset({list, tuple, deque, *_DICTS})


class Container:
    """One container, and what was in it when it was seen last."""

    def __init__(self, name: str, thing: Any) -> None:
        """``thing``: of a type in ``CONTAINERS``."""
        self.name, self.thing = name, thing
        self.is_small = len(thing) <= MOST
        """Whether its objects are looked into."""
        self.places = self._places()
        """A dict's keys; how long it is, of another one."""
        self._items = self._present()

    def has_other_places(self) -> bool:
        """Whether objects were added or removed."""
        return bool(self._places() != self.places)

    def has_other_items(self) -> bool:
        """Whether it has been given other objects since the last call."""
        now = self._present()
        if len(now) == len(self._items) and all(map(is_, now, self._items)):
            return False
        self._items = now
        return True

    def _places(self) -> Any:
        is_listed = self.is_small and type(self.thing) in _DICTS
        return list(self.thing) if is_listed else len(self.thing)

    def _present(self) -> list[Any]:
        if not self.is_small:
            return []
        return list(self.thing.values() if type(self.thing) in _DICTS else self.thing)


def objects_in(
    name: str, thing: Any, modules: Collection[str]
) -> tuple[Container | None, list[tuple[str, Any]]]:
    """The container if it holds objects, and these with names: ``meters[loss]``.

    ``modules``: the names of the script's own.
    """
    if type(thing) not in CONTAINERS:
        return None, []
    pairs = thing.items() if type(thing) in _DICTS else enumerate(thing)
    some = list(islice(pairs, MOST))
    # a container in it is followed if it holds objects itself
    found = [
        (f"{name}[{key if isinstance(key, str | int) else place}]", each)
        for place, (key, each) in enumerate(some)
        if isinstance(each, torch.nn.Module)
        or is_object(each, modules)
        or holds_objects(each, modules)
    ]
    has_objects = any(not isinstance(each, torch.nn.Module) for _, each in found)
    if type(thing) is defaultdict:  # it may get some by itself
        has_objects |= getattr(thing.default_factory, "__module__", None) in modules
    container = Container(name, thing) if has_objects else None
    return container, found if len(thing) <= MOST else []


def holds_objects(thing: Any, modules: Collection[str]) -> bool:
    """Whether this is a container with objects of the script's own in it, or with such a one."""
    return any(
        is_object(each, modules) or any(is_object(one, modules) for one in _some(each))
        for each in _some(thing)
    )


def _some(thing: Any) -> Iterable[Any]:
    if type(thing) not in CONTAINERS:
        return ()
    return islice(thing.values() if type(thing) in _DICTS else thing, MOST)
