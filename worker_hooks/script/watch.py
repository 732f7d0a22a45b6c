"""Finds the values that a script keeps in its globals, closures and objects, and what changes.

Only what changes while training is saved: a setting that stays may be given anew at a resume.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from types import (
    BuiltinFunctionType,
    CellType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from worker_hooks.script import values
from worker_hooks.script.growing import GrowingText, is_growing
from worker_hooks.script.library import is_library
from worker_hooks.script.values import DistributedValueError, LargeValueError, Packed

_OURS = {"worker_hooks", "msrun", "agent"}
_DEPTH = 3  # objects within objects
TOUCHED = 1
"""The checksum of a value that has changed and is not saved; 0: it has not."""

_NONE: Any = object()  # no value
_OUTLINED = 1000  # items of a large dict, or tensors of a list, that are looked at
CONTENTS = attrgetter("cell_contents")
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, torch.nn.Module)


class Holder(Protocol):
    """Where values are, by key: a module's globals, an object's attributes, a closure."""

    def get(self, key: str, default: Any) -> Any:
        """The value."""

    def __setitem__(self, key: str, value: Any) -> None: ...

    def pop(self, key: str, default: Any) -> Any:
        """Remove it."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[str]: ...


class Cells:
    """The variables of a function's closure, as a mapping."""

    def __init__(self, cells: dict[str, CellType]) -> None:
        self._cells = cells

    def get(self, key: str, default: Any) -> Any:
        """The value; ``default``: it has none yet."""
        try:
            return self._cells[key].cell_contents
        except ValueError:
            return default

    def present(self, keys: Iterable[str]) -> list[Any]:
        """The values of these.

        Raises:
            ValueError: one has none yet.
        """
        return list(map(CONTENTS, map(self._cells.__getitem__, keys)))

    def cells(self) -> list[CellType]:
        """All of them."""
        return list(self._cells.values())

    def __setitem__(self, key: str, value: Any) -> None:
        self._cells[key].cell_contents = value

    def pop(self, key: str, default: Any) -> Any:
        """A variable of a closure stays."""

    def __len__(self) -> int:
        return len(self._cells)

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)


class Variable:
    """One value, and how it was when it was seen last."""

    __slots__ = (
        "checksum",
        "growing",
        "holder",
        "initial",
        "is_distributed",
        "is_fixed",
        "is_large",
        "is_outgrown",
        "key",
        "mark",
        "name",
        "packed",
        "value",
        "was",
    )

    def __init__(self, name: str, holder: Holder, key: str) -> None:
        self.name, self.holder, self.key = name, holder, key
        self.value: Any = _NONE
        self.mark: Any = None  # None: not a value that can be saved
        self.is_fixed = True  # no change without another object
        self.is_large = False
        self.is_distributed = False  # that is why it is taken as large
        self.is_outgrown = False  # it could be saved, until it got what cannot be
        self.packed: Packed | None = None
        self.growing: GrowingText | None = None  # what packs it, if it is long
        self.checksum = 0  # of that
        self.was = 0  # the same as of the newest commit
        self.initial: Packed | None = None  # before training

    def look(self, excluded: Collection[int] = ()) -> bool:
        """Whether it has changed since it was seen last.

        ``excluded``: the ids of objects that are saved otherwise.

        Raises:
            TypeError: it cannot be saved.
            LargeValueError: it is too large.
        """
        value = self.holder.get(self.key, _NONE)
        is_same = value is self.value
        if is_same and self.is_fixed:
            return False
        old, was_large = self.mark, self.is_large
        if is_same and was_large:  # it stays so, as to look into it takes long
            self.mark = _outline(value)
            return bool(self.mark != old)
        self.value, self.mark, self.is_fixed, self.is_large = value, None, True, False
        self.is_outgrown = False
        if value is _NONE or id(value) in excluded:
            return False
        try:
            if not is_same:
                values.check(value, excluded)
            self.mark = values.mark(value)
        except LargeValueError as error:
            if not values.is_of_graph(value):
                self.mark, self.is_large = _outline(value), True
                self.is_distributed = isinstance(error, DistributedValueError)
        except TypeError:
            self.is_outgrown = is_same and old is not None
            raise
        self.is_fixed = values.is_fixed(value)
        return bool(self.mark != old or self.is_large != was_large)

    def begin(self, excluded: Collection[int] = ()) -> None:
        """The present value is the initial one, which need not be saved."""
        with contextlib.suppress(Exception):  # an object of any kind
            self.look(excluded)
            if self.mark is not None and not self.is_large:
                self.initial = values.pack(self.value, self.name)
                self.was = self.initial.checksum

    def rewind(self) -> None:
        """Assign the initial value again."""
        self.packed, self.checksum, self.was = None, 0, 0
        if self.initial is not None:
            self.was = self.initial.checksum
            now = self.holder.get(self.key, None)
            text, tensors = json.loads(self.initial.text), self.initial.tensors()
            self.holder[self.key] = values.unpack(text, tensors, now)
        else:
            self.holder.pop(self.key, None)

    def pack(self) -> None:
        """Take the present value apart.

        Raises:
            TypeError: it cannot be saved.
            LargeValueError: it is too large.
        """
        self.packed, self.checksum = None, TOUCHED
        if self.is_large:
            raise LargeValueError(f"{self.name} is too large")
        if self.value is not _NONE:
            self.packed = self._grown() or values.pack(self.value, self.name)
            self.checksum = self.packed.checksum

    def _grown(self) -> Packed | None:
        if not is_growing(self.value) or values.is_floats(self.value):
            return None
        self.growing = self.growing or GrowingText()
        text = self.growing.text(self.value, self.name)
        return None if text is None else Packed(text, (), b"")


def _has_versions() -> bool:
    """Whether Python keeps a number in each dict that is another one after every change (PEP 509).

    No other dict ever has the same. Python 3.11 and 3.12 have it, with no way to ask for it.
    """
    if sys.implementation.name != "cpython":
        return False
    probe: dict[str, Any] = {"a": 0.5}
    found = []
    values: tuple[Any, ...] = (1.5, [], 1.5)
    for value in values:
        found.append(_VERSION_TAG.from_address(id(probe) + _TAG_AT).value)
        probe["a"] = value
    found.append(_VERSION_TAG.from_address(id(probe) + _TAG_AT).value)
    same = _VERSION_TAG.from_address(id(probe) + _TAG_AT).value
    return len(set(found)) == len(found) and found[-1] == same and probe["a"] == probe.get("a")


_VERSION_TAG = ctypes.c_uint64
_TAG_AT = object.__basicsize__ + 8  # behind the count of items
_HAS_VERSIONS = sys.version_info < (3, 13) and _has_versions()


def _dict_version(holder: object) -> ctypes.c_uint64 | None:
    """Has as its value a number that is another one after each change of this dict.

    ``None``: that is not known. The number is read in place, so the dict must stay alive.
    """
    holder = getattr(holder, "attributes", holder)  # in which some of an object's are shown
    if type(holder) is not dict or not _HAS_VERSIONS:
        return None
    return _VERSION_TAG.from_address(id(holder) + _TAG_AT)


class Group:
    """The variables of one holder."""

    def __init__(self, prefix: str, holder: Holder) -> None:
        self.prefix, self.holder = prefix, holder
        self.variables: dict[str, Variable] = {}
        self.size = 0
        self.version = _dict_version(holder)
        self.is_comparable = self.version is not None or isinstance(holder, Cells)
        """Whether a change is seen without a look at each variable: by a version, by cells."""
        self._looked_at: tuple[Variable, ...] = ()
        self._seen: list[Any] = []  # what these held when all of them were looked at last
        self.changeable: list[Variable] = []  # those that can change without another object

    def find_changed(self, look: Callable[[Variable], bool]) -> list[Variable]:
        """Look at each variable that may have changed; those that have."""
        variables = self._looked_at
        if len(variables) != len(self.variables):
            variables = self._looked_at = tuple(self.variables.values())
        now = self._present()
        if len(now) == len(self._seen) and all(map(is_, now, self._seen)):
            return [each for each in self.changeable if look(each)] if self.changeable else []
        found = [
            each
            for each, value in zip(variables, now, strict=True)
            if not (value is each.value and each.is_fixed) and look(each)
        ]
        self._seen = now
        self.changeable = [each for each in variables if not each.is_fixed]
        return found

    def _present(self) -> list[Any]:
        """What the variables hold, in one call for all of them if that is possible."""
        if isinstance(self.holder, Cells):
            try:
                return self.holder.present(self.variables)
            except ValueError:
                pass
        return list(map(self.holder.get, self.variables, repeat(_NONE)))

    def forget(self) -> None:
        """Values were assigned, and are known already: look at all of them next time."""
        self._seen = []

    def forget_variables(self) -> None:
        """There are other variables than before."""
        self._looked_at = ()
        self.forget()

    def move_to(self, holder: Holder) -> None:
        """The variables are another object's from now on."""
        self.holder, self.version = holder, _dict_version(holder)
        self.forget()
        for each in self.variables.values():
            each.holder = holder

    def scan(self, is_skipped: Callable[[str], bool]) -> list[Variable]:
        """Take in names that are new; return their variables."""
        self.size = len(self.holder)
        found = []
        for key in list(self.holder):
            name = self.prefix + key
            if key in self.variables or key.startswith("__") or is_skipped(name):
                continue
            if isinstance(self.holder.get(key, None), _CODE):
                continue
            found.append(Variable(name, self.holder, key))
            self.variables[key] = found[-1]
        return found


def as_object(group: Group) -> object:
    """Has the group's values as attributes."""
    holder = group.holder
    if not isinstance(holder, dict):
        return SimpleNamespace(**{key: holder.get(key, None) for key in holder})
    return SimpleNamespace(**holder)


def groups_of(
    entry: Callable[..., Any] | FrameType | None,
    excluded: Collection[int] = (),
    more: Iterable[tuple[str, Any]] = (),
    meet: Callable[[str, Any], Iterable[tuple[str, Any]]] = lambda *_: (),
    later: Iterable[tuple[str, Any]] = (),
) -> list[Group]:
    """Where the script keeps values: its modules' globals, closures of its functions, its objects.

    Args:
        entry: the training function, or the frame in which the script trains.
        excluded: the ids of objects that are saved otherwise, with all their attributes.
        more: values to look into, with their names.
        meet: called with each value and its name; returns more, which are in it.
        later: as ``more``, but what has a name in the script, too, gets that one.
    """
    modules = local_modules()
    names = {module.__name__ for module in modules}
    found = [Group("" if m.__name__ == "__main__" else f"{m.__name__}.", vars(m)) for m in modules]
    waiting: list[tuple[str, Any, int]] = [("", entry, 0), *((*each, 1) for each in more)]
    for group in list(found):
        waiting += [(group.prefix + key, each, 1) for key, each in list(group.holder.items())]  # type: ignore[attr-defined]
    waiting += [(*each, 2) for each in later]
    seen: set[int] = set()
    for name, thing, depth in waiting:  # which grows
        if id(thing) in seen or id(thing) in excluded or depth > _DEPTH:
            continue
        seen.add(id(thing))
        waiting += [(*each, depth + 1) for each in meet(name, thing)]
        if isinstance(thing, partial):
            prefix = f"{name or 'partial'}."
            found.append(Group(prefix, thing.keywords))
            given = [*enumerate(thing.args), *thing.keywords.items()]
            waiting += [("", thing.func, depth)]
            waiting += [(f"{prefix}{key}", each, depth) for key, each in given]
        elif isinstance(thing, MethodType):
            waiting += [("self", thing.__self__, depth), ("", thing.__func__, depth)]
        elif isinstance(thing, FunctionType):
            if thing.__module__ not in names and depth != 0:
                continue
            fresh = {
                key: cell
                for key, cell in zip(
                    thing.__code__.co_freevars, thing.__closure__ or (), strict=True
                )
                if id(cell) not in seen
            }
            seen.update(map(id, fresh.values()))
            if fresh:
                prefix = thing.__qualname__.rpartition(".<locals>.")[0] + "."
                cells = Cells(fresh)
                found.append(Group(prefix, cells))
                waiting += [(prefix + key, cells.get(key, None), depth + 1) for key in fresh]
        elif is_object(thing, names):
            found.append(Group(f"{name}.", vars(thing)))
            waiting += [(f"{name}.{key}", each, depth + 1) for key, each in vars(thing).items()]
    return found


def with_own_names(groups: Iterable[Group]) -> list[Group]:
    """The groups, of which no two have one prefix: two closures of one function have by nature.

    The first has no number, so that a name that nobody else has stays as the script spells it.
    """
    found, count = list(groups), Counter[str]()
    for each in found:
        count[each.prefix] += 1
        if count[each.prefix] > 1:
            each.prefix = f"{each.prefix[:-1]}#{count[each.prefix]}."
    return found


def drop_values(groups: Iterable[Group], prefix: str) -> bool:
    """Save no more what these groups hold below an object that is followed no more: it gets old.

    Returns:
        Whether there was anything.
    """
    below = (each.variables.values() for each in groups if each.prefix.startswith(prefix))
    dropped = [each for each in chain.from_iterable(below) if each.packed is not None]
    for each in dropped:
        each.packed = None
    return bool(dropped)


def is_object(thing: Any, modules: Collection[str]) -> bool:
    """Whether this is an object of the script's own, with values as attributes.

    So is a scheduler that the script did not register. What is iterated over is data, whose place
    is kept otherwise.
    """
    kind = type(thing)
    if kind in {Namespace, SimpleNamespace} or isinstance(thing, LRScheduler):
        return True
    if kind.__module__ not in modules or not hasattr(thing, "__dict__"):
        return False
    if isinstance(thing, torch.nn.Module | torch.optim.Optimizer | type):
        return False
    return not _hands_out(kind)


def _hands_out(kind: type) -> bool:
    return any(hasattr(kind, name) for name in ("__iter__", "__next__", "__getitem__"))


class DataObject:
    """A sampler or a data set of the script's own; its place is kept, but not its attributes."""

    def __init__(self, name: str, holder: dict[str, Any]) -> None:
        self._name, self._holder = name, holder
        self._version, self._tag = _dict_version(holder), 0
        self._seen: dict[str, Any] = {}

    def changed(self, *, is_first: bool) -> list[str]:
        """Full names of the plain attributes that have changed since the last call.

        ``is_first``: of a loop; what the script has set before it is no change.
        """
        tag = 0 if self._version is None else self._version.value
        if tag and tag == self._tag:
            return []
        now = {key: each for key, each in self._holder.items() if type(each) in values.FIXED}
        was, self._tag, self._seen = self._seen, tag, now
        if is_first:
            return []
        return [f"{self._name}.{key}" for key in now if key in was and now[key] != was[key]]


def data_objects(loader: object) -> list[DataObject]:
    """The script's own sampler and data set that a loader reads, or the loader itself."""
    things = [loader]
    if isinstance(loader, torch.utils.data.DataLoader):
        things = [loader.dataset, loader.sampler, loader.batch_sampler]
    return [
        DataObject(type(each).__name__, vars(each))
        for each in things
        if is_local(type(each).__module__) and hasattr(each, "__dict__")
        if _hands_out(type(each)) and not hasattr(each, "state_dict")
    ]


def local_modules() -> list[ModuleType]:
    """The script, and the modules beside it."""
    main, folder = _script()
    if main is None:
        return []
    names, modules = zip(*[*sys.modules.items()], strict=True)
    before = _Looked.newest
    if before is None or not before.is_of(folder, names, modules):
        loaded = zip(names, modules, strict=True)
        beside = sorted(
            ((name, each) for name, each in loaded if _is_beside(name, each, folder)),
            key=itemgetter(0),
        )
        found = [each for _, each in beside]
        before = _Looked.newest = _Looked(folder, names, modules, found)
    return [main, *(each for each in before.beside if each is not main)]


class _Looked:
    """What was beside the script among these modules: to look through thousands takes milliseconds.

    All of them must be the same objects still; what one says of its equals does not matter.
    """

    newest: _Looked | None = None

    def __init__(
        self,
        folder: str,
        names: tuple[str, ...],
        modules: tuple[ModuleType, ...],
        beside: list[ModuleType],
    ) -> None:
        self._folder, self._names, self._modules = folder, names, modules
        self.beside = beside

    def is_of(self, folder: str, names: tuple[str, ...], modules: tuple[ModuleType, ...]) -> bool:
        """Whether it is of this folder and these modules."""
        is_alike = folder == self._folder and names == self._names
        return is_alike and all(map(is_, modules, self._modules))


def is_local(name: str) -> bool:
    """Whether one of :func:`local_modules` has this name."""
    main, folder = _script()
    module = sys.modules.get(name)
    if main is None or module is None or module.__name__ != name:
        return any(each.__name__ == name for each in local_modules())
    return module is main or _is_beside(name, module, folder)


def _script() -> tuple[ModuleType | None, str]:
    """The script, and the folder it is in; ``None``: it has no file."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if main is None or path is None:
        return None, ""
    return main, os.path.join(os.path.dirname(os.path.abspath(path)), "")


def _is_beside(name: str, module: ModuleType, folder: str) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.startswith(folder):
        return False
    return name.partition(".")[0] not in _OURS and not is_library(file)


def _outline(value: Any) -> Any:
    """What shows most changes of a large value without a look at all of it."""
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version  # noqa: SLF001
    if isinstance(value, dict) and len(value) < _OUTLINED:
        return len(value), tuple(map(_outline, value.values()))
    is_list = type(value) in {list, tuple} and 0 < len(value) < _OUTLINED
    if is_list and isinstance(value[0], torch.Tensor):  # an average of the weights, say
        return id(value), tuple(map(_outline, value))
    return (id(value), len(value)) if hasattr(value, "__len__") else id(value)
