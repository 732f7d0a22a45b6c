"""Finds what trains beside the registered state: a scheduler, an optimizer, an average of weights.

Such an object is not saved, so it begins anew after a replacement or a resume, and weights that
depend on it are others. Whether it is state shows only in training: a frozen teacher is none. So
what was found before the first step is compared later, when
:class:`worker_hooks.training.unkept.Unkept` asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from worker_hooks.script.left_out import (
    Inner,
    attributes,
    inner_objects,
    is_saved,
    registered_objects,
)
from worker_hooks.script.values import FIXED
from worker_hooks.script.watch import Group, local_modules
from worker_hooks.tensors.placements import updating

CHANGES = (
    "`{name}` ({kind}) changes while training and is not registered, so it begins anew after a "
    "replacement or resume: "
)
LEFT_OUT = "the state_dict of `{owner}` leaves it out: register it as well"
CURE = "give it to TrainState({key}={name})"
COUNT = "set {name}.step to the count of its calls, such as state.step, before the loop"
TRAINED = (
    "the optimizer updates a parameter of shape {shape} that is in no registered module, so it "
    "begins anew after a replacement or resume: give it to TrainState, too"
)
HOOK = (
    "the state of the hook `{name}` ({kind}), through which DDP reduces gradients, changes while "
    "training and is not registered, so it begins anew after a replacement or resume: keep it in "
    "an object with state_dict and load_state_dict, and give that to TrainState"
)
_SAMPLED = 64  # tensors of a module, of which one number each is compared
_ITEMS = 64  # of a container in an object
_PLAIN = {Tensor, nn.Parameter, nn.Buffer}


class _Candidate(NamedTuple):
    """An object that may be state."""

    name: str
    thing: ReferenceType[Any]
    mark: Any  # as it was before the first step
    owner: str | None = None  # the registered object that has it


class _Hook(NamedTuple):
    """A hook of a DDP with a state of its own, such as PowerSGD's, which has only slots."""

    name: str
    ddp: ReferenceType[Any]
    place: int  # among its hooks
    mark: Any

    def state(self) -> Any:
        """The present one; ``None``: the DDP is gone."""
        ddp = self.ddp()
        return None if ddp is None else ddp._comm_hooks[self.place][1]  # noqa: SLF001


class Unregistered:
    """The objects of one rank that may be state and are not registered."""

    def __init__(
        self, registered: Mapping[str, object], state_of: Callable[[str], Any] = lambda _: None
    ) -> None:
        """Nothing is looked for before :meth:`begin`.

        Args:
            registered: modules, optimizers, ..., by name.
            state_of: returns what is saved of one of these at a commit; ``None``: all that counts.
        """
        self._registered = dict(registered_objects(registered))
        self._state_of = state_of
        self._candidates: list[_Candidate] = []
        self._hooks: list[_Hook] = []

    def begin(
        self,
        groups: Collection[Group],
        frames: Iterable[FrameType],
        is_ignored: Callable[[str], bool],
    ) -> list[str]:
        """The first loop begins: find objects in globals, closures, attributes and variables.

        Args:
            groups: where the script keeps values; these are followed, and saved.
            is_ignored: tells for a name whether the script said that it is no state.

        Returns:
            Sentences on parameters that an optimizer updates and that are not registered.
        """
        tensors = _tensors_of(self._registered.values())
        inner = list(self._inner())
        covered = {id(each.thing) for each in inner} | {id(group.holder) for group in groups}
        own = {module.__name__ for module in local_modules()}
        found: dict[int, tuple[str, Any]] = {}
        for prefix, holder, is_local in [
            *((group.prefix, group.holder, False) for group in groups),
            *(("", {**frame.f_locals}, True) for frame in frames),
        ]:
            for key in list(holder):
                name, thing = f"{prefix}{key}", holder.get(key, None)
                is_covered = {id(thing), id(attributes(thing))} & covered
                is_data = isinstance(thing, Dataset | Sampler)  # whose settings are kept
                is_own = is_local and not is_data and type(thing).__module__ in own
                if not is_covered and not is_ignored(name) and (is_own or _may_be_state(thing)):
                    found.setdefault(id(thing), (name, thing))
        for name, thing in found.values():
            self._consider(name, thing, _mark(thing, tensors, covered))
            hooks = _hooks_of(name, thing, tensors, covered)
            self._hooks += [each for each in hooks if not is_ignored(each.name)]
        given = self._given()
        for each in inner:
            is_owned = not each.is_part and id(each.thing) not in given
            if is_owned and not is_ignored(each.name) and _may_be_state(each.thing):
                mark = _mark(each.thing, tensors, given)
                self._consider(each.name, each.thing, mark, each.owner)
        modules = [each for _, each in found.values() if isinstance(each, nn.Module)]
        theirs = tensors | {id(each) for module in modules for each in module.parameters()}
        bare = [each for each in _updated(self._registered.values()) if id(each) not in theirs]
        return [TRAINED.format(shape=tuple(each.shape)) for each in bare[:1]]

    def changed(self, is_kept: Callable[[str], bool]) -> list[str]:
        """Sentences on what has changed, each once.

        ``is_kept``: tells for the name of a variable whether its value is saved.
        """
        if not (self._candidates or self._hooks):
            return []
        covered, given = {id(each.thing) for each in self._inner()}, self._given()
        tensors = _tensors_of(self._registered.values())
        told, unchanged = list[str](), list[_Candidate]()
        for each in self._candidates:
            thing = each.thing()
            if thing is None or is_kept(each.name):
                continue
            mark = _mark(thing, tensors, covered if each.owner is None else given)
            if mark is None or mark == each.mark:
                unchanged.append(each)
            elif each.owner is None or self._is_left_out(each.owner, thing):
                kind, key = type(thing).__name__, each.name.rpartition(".")[2]
                cure = CURE.format(name=each.name, key=key)
                if _averages(type(thing)):
                    cure = COUNT.format(name=each.name)
                elif each.owner is not None:
                    cure = LEFT_OUT.format(owner=each.owner)
                told.append(CHANGES.format(name=each.name, kind=kind) + cure)
        self._candidates = unchanged
        return told + self._changed_hooks(tensors, covered)

    def _changed_hooks(self, tensors: Collection[int], covered: Collection[int]) -> list[str]:
        told, unchanged = list[str](), list[_Hook]()
        for each in self._hooks:
            state = each.state()
            if state is None or _mark(state, tensors, covered) == each.mark:
                unchanged.append(each)
            else:
                told.append(HOOK.format(name=each.name, kind=type(state).__name__))
        self._hooks = unchanged
        return told

    def _inner(self) -> Iterator[Inner]:
        """The registered objects and what they consist of."""
        for name, thing in self._registered.items():
            yield from inner_objects(name, thing)

    def _given(self) -> set[int]:
        """The ids of the registered objects, and of the states of registered optimizers."""
        found = self._registered.values()
        states = (updating(each).state for each in found if isinstance(each, Optimizer))
        return {id(each) for each in (*found, *states)}

    def _consider(self, name: str, thing: Any, mark: Any, owner: str | None = None) -> None:
        if mark is not None:
            with contextlib.suppress(TypeError):  # no weak reference to it: it has only slots
                self._candidates.append(_Candidate(name, ref(thing), mark, owner))

    def _is_left_out(self, owner: str, thing: Any) -> bool:
        """Whether what is saved of a registered object lacks the state of one within."""
        state = self._state_of(owner)
        if state is None:
            return False
        try:
            return not is_saved(thing, state)
        except Exception:  # noqa: BLE001  objects of any kind
            return False


def _may_be_state(thing: Any) -> bool:
    if isinstance(thing, nn.Module | Optimizer | LRScheduler | GradScaler):
        return True
    # of the class: an object may make up attributes, or fail to
    kind = type(thing)
    if _averages(kind):
        return True
    if isinstance(thing, type) or hasattr(kind, "__iter__") or hasattr(kind, "__getitem__"):
        return False  # what hands out data has its place kept otherwise
    ways = (getattr(kind, each, None) for each in ("state_dict", "load_state_dict"))
    return all(map(callable, ways))


def _averages(kind: type) -> bool:
    """Whether it is one of torch's averages over ranks, which counts by itself when it is due."""
    return any(each.__name__ == "ModelAverager" for each in kind.__mro__)


def _mark(thing: Any, registered: Collection[int], covered: Collection[int]) -> Any:
    """What differs after the object has changed; ``None``: it holds nothing that could.

    Args:
        thing: the object. If it cannot be read it is left alone, as training must go on.
        registered: the ids of registered tensors.
        covered: the ids of registered objects and of their parts.
    """
    try:
        return _read(thing, registered, covered)
    except Exception:  # noqa: BLE001  objects of any kind, a module without memory yet
        return None


def _read(thing: Any, registered: Collection[int], covered: Collection[int]) -> Any:
    match thing:
        case nn.Module():
            own = [e for e in (*thing.parameters(), *thing.buffers()) if id(e) not in registered]
            return (_versions(own), _sample(own)) if own else None
        case Optimizer():
            if id(thing.state) in covered:  # it wraps a registered one
                return None
            states = [each.values() for each in thing.state.values()]
            groups = [value for group in thing.param_groups for value in group.values()]
            rates = [value for value in groups if type(value) in FIXED]
            inner = [each for each in attributes(thing).values() if isinstance(each, Optimizer)]
            inside = [_read(each, registered, covered) for each in inner]  # ZeRO's state is there
            of_state = _versions(e for some in states for e in some)
            return len(states), of_state, rates, _versions(groups), inside
        case LRScheduler():
            return thing.last_epoch, getattr(thing, "_step_count", 0)
    slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
    values = [*attributes(thing).values(), *(getattr(thing, name, None) for name in slots)]
    flat = [each for value in values for each in _items(value) if id(each) not in registered]
    plain = [each for each in flat if type(each) in FIXED]
    return plain, _versions(flat)


def _hooks_of(
    name: str, ddp: Any, registered: Collection[int], covered: Collection[int]
) -> Iterator[_Hook]:
    """A DDP's hooks whose state is not saved; of a private name of torch, so perhaps none."""
    if isinstance(ddp, DistributedDataParallel):
        for place, (hook, state) in enumerate(getattr(ddp, "_comm_hooks", ())):
            if state is not None and id(state) not in covered:
                told = f"{name}.{getattr(hook, '__name__', type(hook).__name__)}"
                yield _Hook(told, ref(ddp), place, _mark(state, registered, covered))


def _versions(things: Iterable[Any]) -> tuple[int, ...]:
    return tuple(
        each._version  # noqa: SLF001
        for each in things
        if isinstance(each, Tensor) and not each.is_inference()
    )


def _sample(tensors: list[Tensor]) -> tuple[float, ...]:
    """Some numbers, as no version tells of a change through ``.data``.

    Not of a sharded tensor: to read one is a collective, and the other ranks do not take part.
    """
    plain = [each for each in tensors if type(each) in _PLAIN and not each.is_meta]
    some = [each for each in plain if each.numel() and each.is_floating_point()][:_SAMPLED]
    with torch.no_grad():
        return tuple(float(each.reshape(-1)[each.numel() // 2]) for each in some)


def _items(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict | list | tuple) and len(value) <= _ITEMS:
        yield from value.values() if isinstance(value, dict) else value


def _tensors_of(registered: Iterable[Any]) -> set[int]:
    found: set[int] = set()
    for each in registered:
        if isinstance(each, nn.Module):
            found |= {id(tensor) for tensor in (*each.parameters(), *each.buffers())}
        elif isinstance(each, Tensor):
            found.add(id(each))
        elif isinstance(each, Mapping | list | tuple):
            found |= _tensors_of(each.values() if isinstance(each, Mapping) else each)
    return found


def _updated(registered: Iterable[Any]) -> Iterator[Tensor]:
    for each in registered:
        if isinstance(each, Optimizer):
            for group in each.param_groups:
                yield from group["params"]
        elif isinstance(each, Mapping | list | tuple):
            yield from _updated(each.values() if isinstance(each, Mapping) else each)
