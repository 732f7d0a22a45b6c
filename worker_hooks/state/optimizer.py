"""A registered optimizer: its per-parameter state is live, its groups' values are copied.

Only the optimizer's ``step`` changes per-parameter state, so until the next update begins it is as
of the commit. Schedulers and scripts may change a group's values at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import accumulate, chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from worker_hooks.state.mismatch import listed, missing
from worker_hooks.state.snapshot import FIXED, copied, is_constant
from worker_hooks.tensors import placements, state_json
from worker_hooks.tensors.placements import Distributed, SavedPart, SavedPlacements
from worker_hooks.tensors.state_json import Json

log = logging.getLogger("msrun")

MOVED = "%s: the parameters were in another order, and are known by their names"

_PARAMS = itemgetter("params")
_OWN = ("params", "param_names")  # of a group: not saved, as they belong to the process


class Groups(NamedTuple):
    """What a commit keeps of an optimizer."""

    values: list[dict[str, Any]]  # of each group
    has_grads: bool  # the script keeps gradients from one step to the next, zeroed or stale
    sizes: tuple[int, ...]  # how many parameters each group has
    names: list[str]  # of the parameters; a layer that is inserted later gives them others


class _Found(NamedTuple):
    """The tensors of an optimizer's state, and what tells whether they are still all of it."""

    tensors: dict[str, Tensor]
    counts: list[int]  # of parameters in each group
    flat: list[Any]  # the values of all parameters' states
    distributed: Distributed  # those of them that are


class OptimizerPiece:
    """An optimizer that keeps its state as torch's optimizers do.

    Tensors are named ``{name}.state.{index}.{key}``; the index counts over all groups, as in
    ``state_dict()``. The parameters' names are saved beside them: an index alone does not tell
    which parameter it was, if a script gives them in another order.
    """

    is_compared = True
    modules: tuple[torch.nn.Module, ...] = ()

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self.name = name
        self.name_parameters: Callable[[], Mapping[int, str]] = dict
        """Returns the names of all parameters that have one, by their ``id``."""
        self._named: tuple[list[int], list[str]] = [], []  # parameters, and their names
        self._sizes: tuple[int, ...] | None = None  # of the groups, when they were looked up
        self.optimizers = (optimizer,)
        self._optimizer = optimizer
        self._updating = placements.updating(optimizer)
        trained = (each for each in self._parameters() if each.requires_grad)
        self._first = next(trained, None)
        self._found: _Found | None = None
        self._values: list[dict[str, Any]] = []  # of each group, as copied last
        # all objects that were copied; empty: they may change in place
        self._seen: list[Any] = []

    def tensors(self) -> dict[str, Tensor]:
        """The state's tensors; there are none before the first update.

        It is the same object, not to be changed, until the state has other tensors.
        """
        groups = self._optimizer.param_groups
        try:
            flat = list(chain.from_iterable(map(dict.values, self._updating.state.values())))
        except TypeError:  # the state of a parameter is no dict
            return self._state()[1]
        found, counts = self._found, list(map(len, map(_PARAMS, groups)))
        if (
            found is not None
            and found.counts == counts
            and _are_same(flat, found.flat)
            and found.distributed.are_same()
        ):
            return found.tensors
        tensors = self._state()[1]
        # containers inside may have other tensors any time
        is_flat = all(isinstance(each, Tensor) or each.__class__ in FIXED for each in flat)
        distributed = placements.distributed(flat)
        self._found = _Found(tensors, counts, flat, distributed) if is_flat else None
        return tensors

    def snapshot(self) -> Groups:
        """The groups' values, and whether gradients are kept."""
        optimizer, seen = self._optimizer, self._seen
        now = list(chain.from_iterable(map(dict.values, optimizer.param_groups)))
        is_seen = len(self._values) == len(optimizer.param_groups) and len(now) == len(seen)
        if not (is_seen and all(map(is_, now, seen))):
            self._values = [_values(group) for group in optimizer.param_groups]
            is_fixed = all(is_constant(value) for group in self._values for value in group.values())
            self._seen = now * is_fixed
        # a parameter with state has had a gradient: without one now, the script sets them to None
        probe = next(iter(self._updating.state), self._first)
        sizes = self.structure()
        if sizes != self._sizes:
            self._sizes = sizes
            self.names()
        has_grads = getattr(probe, "grad", None) is not None
        return Groups(self._values, has_grads, sizes, self._named[1])

    def structure(self) -> tuple[int, ...]:
        """How many parameters each group has."""
        return tuple([len(group["params"]) for group in self._optimizer.param_groups])

    def names(self) -> list[str]:
        """The name of each parameter, by its index; empty: it is in no registered module.

        They are looked up once for the same parameters: inside a step a module may hold others.
        """
        now = list(map(id, self._parameters()))
        if now != self._named[0]:
            found = self.name_parameters()
            self._named = now, [found.get(each, "") for each in now]
        return self._named[1]

    @property
    def is_all_tensors(self) -> bool:
        """Whether the state of its parameters holds nothing but tensors."""
        states = self._updating.state.values()
        return all(
            each is None or isinstance(each, Tensor) for held in states for each in held.values()
        )

    def marks(self) -> None:
        """Nothing: torch's hooks count the updates."""

    def encode(self, snapshot: Groups) -> tuple[Json, dict[str, Tensor]]:
        """Groups, and the state without its tensors, as JSON; and the groups' tensors.

        Raises:
            TypeError: something cannot be saved without pickle.
        """
        groups, small = state_json.encode(snapshot.values, f"{self.name}.groups")
        state, _ = self._state()
        value = {
            "groups": groups,
            "sizes": list(snapshot.sizes),
            "names": snapshot.names,
            "state": state,
            "device": self._first.device.type if self._first is not None else "cpu",
            "grads": snapshot.has_grads,
        }
        return value, small

    def mismatches(self, like: Mapping[str, Tensor], value: Json) -> list[str]:
        """Why this cannot be restored from tensors shaped like these."""
        sizes = list(self.structure())
        if sizes != value["sizes"]:
            return [f"{self.name} had groups of {value['sizes']} parameters and has {sizes}"]
        places = self._places(value)
        return [f"{self.name} {places}"] if isinstance(places, str) else missing(value, like)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], value: Json) -> None:
        """Put state and groups back.

        ``load_state_dict`` is not used because it casts the state to the parameters' dtype.
        """
        self._restore(tensors, value, state_json.decode(value["groups"], tensors))

    def as_now(self, value: Json, shape_of: Callable[[str], tuple[int, ...]]) -> Json:
        """A saved value in the parameters' order, and cut as they are, in this process.

        Args:
            value: of :meth:`encode`, perhaps on another mesh, or on none.
            shape_of: returns the shape of a whole saved tensor.
        """
        value = self._in_order(value)
        parameters, of = self._parameters(), value["state"]["of"]
        is_cut = any(map(placements.is_distributed, parameters))
        if not is_cut and not state_json.boxes_in(of):
            return value

        def cut(text: str, held: Json) -> Json:
            like = parameters[int(text)] if int(text) < len(parameters) else None

            def place_of(name: str, was: SavedPlacements | None) -> SavedPlacements | None:
                if not placements.is_distributed(like):
                    return None
                if was is not None and placements.is_of_mesh(was, like):
                    return was
                is_alike = shape_of(name) == tuple(getattr(like, "shape", ()))
                return placements.save_placements(name, like) if is_alike else was

            return state_json.with_places(held, place_of)

        now = {text: cut(text, held) for text, held in of.items()}
        return {**value, "state": {**value["state"], "of": now}}

    def _in_order(self, value: Json) -> Json:
        """With the state of each parameter under its present index; unchanged, if nobody knows."""
        places = self._places(value)
        if isinstance(places, str) or places == list(range(len(places))):
            return value
        log.info(MOVED, self.name)
        state = value["state"]
        moved = sorted((places[int(text)], held) for text, held in state["of"].items())
        of = {str(index): held for index, held in moved}
        return {**value, "names": self.names(), "state": {**state, "of": of}}

    def _places(self, value: Json) -> list[int] | str:
        """The present index of each saved parameter, or why that is not known, as text."""
        now, sizes = self.names(), value["sizes"]
        then = value.get("names", now)  # older files have none
        if _may_be_same(then, now):
            return list(range(len(then)))
        lost = {*then} ^ {*now}
        if "" in {*then, *now}:
            why = "some are in no registered module"
        elif lost:
            return f"had other parameters; on one side only: {listed(lost)}"
        elif sizes != list(self.structure()) or _grouped(then, sizes) != _grouped(now, sizes):
            why = "in other groups"
        elif value["state"]["other"] or len(value["state"]["of"]) == 1:
            why = "it may have state of all of them together"
        else:
            index_of = {name: index for index, name in enumerate(now)}
            return [index_of[name] for name in then]
        return f"had its parameters in another order, and {why}"

    def _restore(
        self, tensors: Mapping[str, Tensor], value: Json, decoded: list[dict[str, Any]]
    ) -> None:
        optimizer, state = self._optimizer, self._updating.state
        parameters = self._parameters()
        was_host = value["device"] == "cpu"
        state.clear()
        for key, held in state_json.decode(value["state"]["other"], tensors).items():
            state[key] = held
        groups = [group for group in optimizer.param_groups for _ in group["params"]]
        for text, encoded in value["state"]["of"].items():
            parameter, group = parameters[int(text)], groups[int(text)]
            held = state_json.decode(encoded, tensors)
            state[parameter] = _on_device(held, parameter, group, was_host=was_host)
        for group, values in zip(optimizer.param_groups, decoded, strict=True):
            for key, then in values.items():
                _set(group, key, then)
        had_grads = set(value["state"]["of"]) if value["grads"] else set()
        # stateless, or all state is one parameter's, as with LBFGS; or other ranks have some of it
        if value["grads"] and (len(had_grads) <= 1 or self._updating is not optimizer):
            had_grads = {str(index) for index in range(len(parameters))}
        for index, parameter in enumerate(parameters):
            has_grad = str(index) in had_grads and parameter.requires_grad
            parameter.grad = torch.zeros_like(parameter) if has_grad else None

    def restore_alike(self, tensors: Mapping[str, Tensor], value: Json) -> None:
        """Put back the groups that are there already; the script has yet to add the others."""
        sizes = list(self.structure())
        count, state = sum(sizes), value["state"]
        names = value.get("names", [])[:count]  # of all; older files have none
        if sizes != value["sizes"][: len(sizes)] or (
            names and not _may_be_same(names, self.names())
        ):
            return  # an index does not tell which parameter it was
        of = {text: held for text, held in state["of"].items() if int(text) < count}
        groups = state_json.decode(value["groups"], tensors)[: len(sizes)]
        self._restore(tensors, {**value, "state": {**state, "of": of}}, groups)

    def _parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(g["params"] for g in self._optimizer.param_groups))

    def _state(self) -> tuple[Json, dict[str, Tensor]]:
        """The optimizer's whole state; that of a parameter under its index."""
        indices: dict[int, int] = {}
        for index, parameter in enumerate(self._parameters()):
            indices.setdefault(id(parameter), index)
        of: dict[str, Any] = {}
        other: dict[Any, Any] = {}
        state: dict[Any, Any] = self._updating.state
        for key, held in list(state.items()):
            if not isinstance(key, Tensor):
                other[key] = held
            elif id(key) in indices:
                of[str(indices[id(key)])] = held
        in_order = dict(sorted(of.items(), key=lambda item: int(item[0])))
        of_json, tensors = state_json.encode(in_order, f"{self.name}.state", takes_parts=True)
        other_json, more = state_json.encode(other, f"{self.name}.other")
        return {"of": of_json, "other": other_json}, tensors | more


def _may_be_same(then: list[str], now: list[str]) -> bool:
    """Whether no name says that these are other parameters, or in another order."""
    return len(then) == len(now) and all(
        one == other or not one or not other for one, other in zip(then, now, strict=True)
    )


def _grouped(names: list[str], sizes: list[int]) -> list[set[str]]:
    ends = list(accumulate(sizes))
    return [set(names[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _are_same(new: list[Any], old: list[Any]) -> bool:
    """Whether these are the same objects, or plain values in place of others."""
    if len(new) != len(old):
        return False
    return all(map(is_, new, old)) or all(
        one is other or (one.__class__ in FIXED and other.__class__ in FIXED)
        for one, other in zip(new, old, strict=True)
    )


def _values(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a group's values, without those that belong to the process."""
    values = group.copy()
    for key in _OWN:
        values.pop(key, None)
    for key, value in values.items():
        if value.__class__ not in FIXED:
            values[key] = copied(value)
    return values


def _on_device(held: Any, parameter: Tensor, group: Mapping[str, Any], *, was_host: bool) -> Any:
    """State on its parameter's device; what was on the host beside an accelerator stays there."""
    if not isinstance(held, dict):
        return _moved(held, parameter, was_host=was_host)
    counts_on_device = bool(group.get("capturable") or group.get("fused"))
    return {
        key: each
        if was_host and key == "step" and not counts_on_device  # torch's rule for a step counter
        else _moved(each, parameter, was_host=was_host)
        for key, each in held.items()
    }


def _moved(held: Any, parameter: Tensor, *, was_host: bool) -> Any:
    if isinstance(held, Tensor):
        return held.to(parameter.device) if was_host or held.device.type != "cpu" else held
    if isinstance(held, SavedPart):
        part = _moved(held.tensor, parameter, was_host=was_host)
        return placements.restored(held._replace(tensor=part), parameter)
    if isinstance(held, dict):
        return {key: _moved(each, parameter, was_host=was_host) for key, each in held.items()}
    if isinstance(held, list | tuple):
        return type(held)(_moved(each, parameter, was_host=was_host) for each in held)
    return held


def _set(group: dict[str, Any], key: str, then: Any) -> None:
    """Set a group's value; a tensor keeps its memory, which a captured graph may refer to."""
    now = group.get(key)
    if isinstance(now, Tensor) and isinstance(then, Tensor | float | int):
        if not isinstance(then, Tensor):
            now.fill_(then)
            return
        if now.shape == then.shape and now.dtype == then.dtype:
            now.copy_(then)
            return
    group[key] = then
