"""Values of the script that change while training, and that nothing keeps: they are named.

What is small and plain is saved at each commit where it changes (:mod:`worker_hooks.script.kept`).
The rest begins anew after a replacement or a resume: a large array that is filled in place, an
object that hands out items, has only slots or lies deep within others, an iterator, an argument's
default that collects; and what a variable refers to, if it is given another function, loss module
or member of an enumeration. Whether these change shows only in training. So they are looked at
when it begins, and whenever :class:`worker_hooks.training.unkept.Unkept` asks.
"""

from __future__ import annotations

import enum
import linecache
import os
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from itertools import chain, repeat
from types import BuiltinFunctionType, FunctionType, GeneratorType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from worker_hooks.contract.script_record import OWN
from worker_hooks.data.look import look
from worker_hooks.rng.generators import stream_of
from worker_hooks.script.containers import MOST
from worker_hooks.script.kept import SHARED, ScriptValues
from worker_hooks.script.notice import HARMLESS
from worker_hooks.script.values import FIXED, is_array, is_of_graph
from worker_hooks.script.watch import Group, local_modules

CHANGES = (
    "`{name}` ({kind}) changes while training and is kept nowhere, so it begins anew after a "
    "replacement or resume: keep what counts of it in state.own, or give it to TrainState with "
    "state_dict and load_state_dict; {harmless}"
)
REPLACED = (
    "`{name}` is given another {kind} while training, and has its first one again after a "
    "replacement or resume: choose it at the top of each epoch, by the epoch or by a value in "
    "state.own; or make it before training, and give it to TrainState"
)

_READ_BYTES = 16 << 20  # of an array; of a larger one both ends
_CONTAINERS = (dict, list, set, deque, bytearray)
_CODE = (FunctionType, BuiltinFunctionType, type, torch.nn.Module, enum.Enum)
_LOOKED_INTO = (torch.Tensor, partial, threading.local, ContextVar, *_CONTAINERS)
_FEEDS = (DataLoader, Dataset, Sampler)
_NONE: Any = object()
_QUOTED = re.compile(r"""["'](\w+)["']""")


class UnkeptValues:
    """Finds the values of one rank that nothing keeps."""

    def __init__(self, script: ScriptValues) -> None:
        """Look at what there is before the first step."""
        self._script = script
        self._modules = local_modules()
        self._own = {each.__name__ for each in self._modules}
        self._environ = _environ_in(self._modules)
        self._listed: set[int] = set()
        self._named: set[str] = set()
        self._made_anew: set[str] = set()  # by each step
        self._seen = self._look()

    def changed(self, *, is_first: bool) -> list[str]:
        """Sentences on what has changed, each once.

        Args:
            is_first: the first step is committed.
        """
        before, self._seen = self._seen, self._look()
        told = list[str]()
        for name, now in self._seen.items():
            was = before.get(name, now)
            if name in self._named or name in self._made_anew or was == now:
                continue
            is_referred = isinstance(now, _Referred)
            if is_referred and is_first:  # by this step, and by the next one again
                self._made_anew.add(name)
            elif not self._script.is_ignored(name):
                self._named.add(name)
                kind, harmless = now.kind or was.kind, HARMLESS.format(name)
                sentence = REPLACED if is_referred else CHANGES
                told.append(sentence.format(name=name, kind=kind, harmless=harmless))
        return told

    def _look(self) -> dict[str, _Seen]:
        found: dict[str, _Seen] = {}
        containers = set[int]()
        for name, value in self._unkept():
            if isinstance(value, _CONTAINERS):
                if id(value) in containers:  # another name of one
                    continue
                containers.add(id(value))
            try:
                found[name] = self._seen_of(name, value)
            except Exception:  # noqa: BLE001, S112  values of any kind
                continue
        for name, value in self._plain():
            is_fixed = type(value) in FIXED
            with suppress(Exception):  # values of any kind
                kind = type(value).__name__
                found[name] = _Seen(kind, value) if is_fixed else self._seen_of(name, value)
        return found

    def _unkept(self) -> Iterator[tuple[str, Any]]:
        """What is not saved if it changes, with names."""
        script = self._script
        followed = {id(getattr(each.holder, "attributes", each.holder)) for each in script.groups}
        listed = self._listed = set[int]()  # one of them may be the present one: a stage, a task
        for group in [*script.groups]:
            for value in map(group.holder.get, [*group.holder], repeat(None)):
                if isinstance(value, (list, tuple, dict)) and len(value) <= MOST:
                    listed.update(map(id, value.values() if isinstance(value, dict) else value))
        for group in [*script.groups]:
            if group.prefix in {OWN, SHARED}:  # what cannot be kept there raises
                continue
            for key in [*group.holder]:
                value, name = group.holder.get(key, _NONE), f"{group.prefix}{key}"
                if value is _NONE or key.startswith("__") or name in script.large:
                    continue
                is_left = script.is_registered(value) or _is_kept(group, key, value)
                is_left |= is_of_graph(value)
                is_left &= value is not None  # for which there may be an object later
                is_followed = id(getattr(value, "__dict__", None)) in followed
                is_whole = isinstance(value, torch.nn.Module) or id(value) in listed
                if not is_left and (is_whole or not is_followed):
                    yield name, value
        for module in self._modules:
            yield from _defaults(module)

    def _plain(self) -> Iterator[tuple[str, Any]]:
        """What modules hold and nobody follows: set by a name that is computed, by a library."""
        groups = self._script.groups
        kept = {
            (id(getattr(each.holder, "attributes", each.holder)), key)
            for each in groups
            for key in each.variables
        }
        for name, held, key in self._script.plain_of_modules():
            if (id(held), key) not in kept and key != "training":
                yield name, held[key]
        for name in self._environ:
            yield f"os.environ[{name!r}]", os.environ.get(name)

    def _seen_of(self, name: str, value: Any) -> _Seen:
        kind = type(value).__name__
        if value is None:
            return _Referred("value", None)
        if isinstance(value, _CODE):
            if isinstance(value, torch.nn.Module) and self._is_wrapper(value):
                return _Referred("", None)
            return _Referred(_KINDS.get(type(value), kind), value)
        if id(value) in self._listed and hasattr(value, "__dict__"):
            return _Referred(kind, value)
        if is_array(value) and not value.dtype.hasobject and value.nbytes <= _READ_BYTES:
            return _Seen(kind, (value.shape, zlib.crc32(value.tobytes())))
        if hasattr(type(value), "__next__"):
            return _Seen(kind, _place_of(value))
        if isinstance(value, _LOOKED_INTO) or is_array(value):
            return _Seen(kind, self._content(name, _inside(value)))
        if type(value).__module__ in self._own and not isinstance(value, _FEEDS):
            return _Seen(kind, self._content(name, value))
        if _is_numpys(value) and stream_of(value) is None:
            return _Seen(kind, repr(getattr(value, "state", getattr(value, "bit_generator", None))))
        return _Seen("", None)

    def _content(self, name: str, value: Any) -> Any:
        """What a bounded look finds, without what is saved otherwise."""
        return look({name: value}, self._script.excluded)

    def _is_wrapper(self, module: torch.nn.Module) -> bool:
        """Whether it has registered parameters only, as a DDP around a registered module has."""
        own = [*module.parameters(), *module.buffers()]
        return bool(own) and all(map(self._script.is_registered, own))


class _Seen:
    """What was found at a name: two are equal if nothing has changed."""

    def __init__(self, kind: str, content: Any) -> None:
        """``kind``: for people; empty: this is not looked at."""
        self.kind, self.content = kind, content

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen) or not (self.kind or other.kind):
            return isinstance(other, _Seen)
        return bool(self.content == other.content)

    __hash__ = None  # type: ignore[assignment]


class _Referred(_Seen):
    """A function, a class, a module: what counts is which one it is. It is not kept alive."""

    def __init__(self, kind: str, content: Any) -> None:
        try:
            held: Callable[[], Any] = ref(content)
        except TypeError:  # None, something built in
            held = partial(_itself, content)
        super().__init__(kind, held)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen) or not (self.kind or other.kind):
            return isinstance(other, _Seen)
        return isinstance(other, _Referred) and self.content() is other.content()

    __hash__ = None


def _itself(thing: Any) -> Any:
    return thing


_KINDS = {FunctionType: "function", BuiltinFunctionType: "function", type: "class"}


def _is_kept(group: Group, key: str, value: Any) -> bool:
    """Whether a change of it would be seen, and saved."""
    variable = group.variables.get(key)
    if variable is None:  # code, a module
        return not isinstance(value, _CODE)
    return variable.packed is not None or (variable.mark is not None and not variable.is_large)


def _inside(value: Any) -> Any:
    """What a value of the present thread, the main one, holds; of any other value itself."""
    if isinstance(value, ContextVar):
        return value.get(None)
    return vars(value) if isinstance(value, threading.local) else value


def _environ_in(modules: Iterable[ModuleType]) -> list[str]:
    """The variables of the environment that these modules speak of: a library's may change."""
    found = set[str]()
    for each in modules:
        for line in linecache.getlines(getattr(each, "__file__", None) or ""):
            if "environ" in line or "putenv" in line:
                found.update(_QUOTED.findall(line))
    return sorted(found)


def _defaults(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Defaults of arguments of a module's functions and methods that can change in place."""
    own = [
        each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__
    ]
    classes = [each for each in own if isinstance(each, type)]
    inside: Iterable[Any] = chain.from_iterable(vars(each).values() for each in classes)
    for function in chain(own, inside):
        if isinstance(function, FunctionType):
            code, defaults = function.__code__, function.__defaults__ or ()
            names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
            pairs = [*zip(names, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]
            for name, value in pairs:
                if isinstance(value, _CONTAINERS):
                    yield f"{function.__qualname__}({name}=...)", value


def _place_of(iterator: Any) -> Any:
    """What differs after an iterator has handed out something, as far as it tells."""
    if isinstance(iterator, GeneratorType):
        return id(iterator), iterator.gi_frame is None or iterator.gi_frame.f_lasti
    if type(iterator).__module__ == "itertools":
        return repr(iterator)
    hint: Callable[[], int] | None = getattr(iterator, "__length_hint__", None)
    return id(iterator), None if hint is None else hint()


def _is_numpys(value: Any) -> bool:
    return type(value).__module__.startswith("numpy.random")
