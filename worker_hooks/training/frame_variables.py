"""The variables of one of the script's frames, as text: what is kept of them at each commit.

Most cannot change while a loop runs: numbers and texts in frames that wait for a function to
return, and those that the loop does not set. They are read once a loop.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker_hooks.script.growing import MAPPINGS, GrowingText, is_growing
from worker_hooks.script.kept import ScriptValues
from worker_hooks.script.library import is_library
from worker_hooks.script.source import Named
from worker_hooks.state.snapshot import FIXED, copied
from worker_hooks.tensors import state_json

IS_COPY = sys.version_info < (3, 13)  # ``f_locals`` of a function is a copy of its variables
STILL_ROOM = 30 << 10  # characters for what cannot change in the loop
_VALUE_BYTES = 1024  # of a text, of a tensor
_CARRIED_BYTES = 128 << 10  # of a tensor that training depends on
TEXT_ROOM = 60 << 10  # characters of one value; more for tensors
_ITEMS = 8192  # of all containers in a value
_NESTED, _TENSOR, _DEEP = 4, 64, 20  # as so many items; and so many levels
_PLAIN_INT = 1 << 53  # beyond it JSON of others has no exact numbers
_CONTAINERS = {*MAPPINGS, list, tuple, set, frozenset, deque}
_CONTAINERS_IN = {"builtins", "collections", "numpy", "torch"}
_UNSET = object()  # a variable without a value


class Kept(NamedTuple):
    """A value, and what is saved of it."""

    value: Any  # a copy, if it may change in place; ``None`` for what is always read anew
    text: str  # JSON: the encoded value, its tensors by name, and its class if it has one
    at: int = 0  # the id of what can change in place
    inner: frozenset[int] = frozenset()  # the ids of such things directly in it


class FrameRole(NamedTuple):
    """What a loop tells of one frame's variables."""

    carried: Mapping[str, Named]  # without which training would continue in another way
    always: frozenset[str]  # carried from one batch to the next: read at each commit
    steering: frozenset[str]  # training depends on them, or what it returns
    results: frozenset[str]  # of those: only what it returns
    written: frozenset[str] | None  # what the loop may set; ``None``: anything
    addresses: frozenset[int]  # of registered memory


_NO_ROLE = FrameRole({}, frozenset(), frozenset(), frozenset(), None, frozenset())


class FrameVariables:
    """Reads one frame. Only the main thread uses it, or another one while that is blocked."""

    def __init__(self, frame: FrameType, script: ScriptValues) -> None:
        """Nothing is read before :meth:`enter`."""
        self.frame = frame
        self.name = frame.f_code.co_qualname
        self.kept: dict[str, Kept] = {}
        self.first: Mapping[str, str] = {}  # texts when such a frame was first seen
        self.role = _NO_ROLE
        self._script = script
        self._growing: dict[str, GrowingText] = {}
        self._refused: dict[str, tuple[int, int]] = {}  # ids and sizes of what cannot be kept
        self._elsewhere: frozenset[str] = frozenset()  # saved by others, or ignored
        self._held: frozenset[str] | None = None  # that is up to date with it
        self._is_copy = IS_COPY and self.is_function
        self._watched: tuple[str, ...] | None = None  # what may change in the loop; all
        self._still = ("", "")  # the others, as text: those that have changed, and the rest
        self.still_text = ""  # as :meth:`text`, if nothing in the frame may change
        self.has_changed = True
        """Whether :attr:`kept` may say something else than when this was set to false."""
        self._last: tuple[list[int], str, list[int]] | None = None  # rooms, text, and rooms left
        self.may_wait = True  # for what a device still calculates
        self._has_arrays = False  # in the value that was weighed last
        self._most_bytes = _VALUE_BYTES  # of a tensor in the value that is weighed

    @property
    def is_function(self) -> bool:
        """Whether its variables are a function's, not a module's."""
        return is_function(self.frame)

    @property
    def is_still(self) -> bool:
        """Whether nothing in it may change before the loop is over."""
        return self._watched == () and self._held is self._script.held

    def enter(
        self,
        role: FrameRole,
        first: Mapping[str, str] | None,
        note_lost: Callable[[Named, Any], None],
    ) -> None:
        """A loop begins.

        Args:
            role: what the loop tells of the frame.
            first: texts when such a frame was first seen; ``None``: this is the first.
            note_lost: called with what nothing keeps.
        """
        self.role = role
        if first is None:
            self.read(note_lost, is_last=True)
            first = {name: kept.text for name, kept in self.kept.items()}
            self.forget()
        self.first = first
        self._note_change()

    def forget(self) -> None:
        """Variables were set from outside."""
        self._watched = None
        self._note_change()

    def _note_change(self) -> None:
        self.has_changed, self._last = True, None

    def text(self, rooms: list[int], no_room: Callable[[Named, Any], None]) -> str:
        """As JSON: the name, variables that have changed since it was first seen, and the others.

        Args:
            rooms: characters that are left for a variable, and for one that training depends on.
            no_room: called with what has no room, and ``None``.
        """
        if self._last is not None and self._last[0] == rooms:  # as in most steps
            rooms[:] = self._last[2]
            return self._last[1]
        before = rooms[:]
        first, steering = self.first, self.role.steering
        parts: tuple[list[str], list[str]] = ([], [])
        moving: Iterable[str] = self.kept
        if self._watched is not None:
            changed, others = self._still
            rooms[0] -= len(changed) + len(others)
            parts = ([changed] * bool(changed), [others] * bool(others))
            moving = self._watched
        same, shared = self._aliases()
        for name in moving:
            kept = self.kept.get(name)
            if kept is None:
                continue
            if name in same:
                parts[0].append(f'"{name}":{json.dumps(["", {}, {"same": same[name]}])}')
                continue
            if name in shared:
                if name in self.role.carried:
                    no_room(self.role.carried[name], None)
                continue
            which, size = name in steering, len(kept.text) + len(name) + 4
            if rooms[which] > size:
                rooms[which] -= size
                parts[first.get(name) == kept.text].append(f'"{name}":{kept.text}')
            elif name in self.role.carried:
                no_room(self.role.carried[name], None)
        text = f'["{self.name}",{{{",".join(parts[0])}}},{{{",".join(parts[1])}}}]'
        self._last = before, text, rooms[:]
        return text

    def _aliases(self) -> tuple[dict[str, str], set[str]]:
        """Names of what another name stands for, too, and names of what is also within another."""
        by_id: dict[int, str] = {}
        same: dict[str, str] = {}
        inner: set[int] = set()
        for name, kept in self.kept.items():
            if kept.at:
                first = by_id.setdefault(kept.at, name)
                if first != name:
                    same[name] = first
                elif kept.inner:
                    inner |= kept.inner
        shared = {by_id[each] for each in inner & by_id.keys()}
        if shared:  # and what they are in
            within = {each for each in inner if by_id.get(each) in shared}
            shared |= {name for name, kept in self.kept.items() if kept.inner & within}
            same = {name: first for name, first in same.items() if first not in shared}
        return same, shared

    def read(
        self,
        note_lost: Callable[[Named, Any], None],
        *,
        is_last: bool,
        only: Iterable[str] | None = None,
    ) -> None:
        """Bring :attr:`kept` up to date.

        Args:
            note_lost: called with what nothing keeps.
            is_last: perhaps the loop's last commit: read what each batch makes anew, too, and what
                is on a device, although to read it is to wait for it.
            only: the names of what is read; ``None``: all.
        """
        if self._held is not self._script.held:
            self._find_elsewhere()
        watched = self._watched if only is None else only
        values = self.frame.f_locals
        for name in {**values, **self.kept} if watched is None else watched:
            value = values.get(name, _UNSET)
            if type(value) not in FIXED and not self._is_due(name, value, is_last=is_last):
                kept = None
            else:
                kept = self._keep(name, value)
                if kept is None and name in self.role.carried:
                    self._note_lost(name, value, note_lost)
            was = self.kept.get(name)
            if kept is not was and (kept and kept[1:]) != (was and was[1:]):
                self._note_change()
            if kept is not None:
                self.kept[name] = kept
            elif was is not None:
                del self.kept[name]
            if type(value) not in FIXED and value is not _UNSET and self._is_copy:
                del values[name]  # else the copy would keep its memory for a step more
        if self._watched is None and only is None:
            self._find_watched()

    def _is_due(self, name: str, value: Any, *, is_last: bool) -> bool:
        """Whether to read it now: within the loop not what is made anew for each batch.

        A tensor on a device is waited for.
        """
        is_there = not isinstance(value, Tensor) or value.is_cpu
        if name in self.role.always or is_last:
            return is_there or self.may_wait
        written = self.role.written
        return is_there and (written is None or name not in written)

    def _note_lost(self, name: str, value: Any, note_lost: Callable[[Named, Any], None]) -> None:
        if name not in self._elsewhere and value is not _UNSET:
            note_lost(self.role.carried[name], value)

    def _find_watched(self) -> None:
        """What may change before the loop is over: what it sets, and what changes in place.

        Globals that functions set are found, and saved, as the script's own values.
        """
        code, written = self.frame.f_code, self.role.written
        if written is None:
            return
        changeable = {
            name
            for name, kept in self.kept.items()
            if kept.value is None or type(kept.value) not in FIXED
        }
        watched = written | changeable | self.role.always | {*code.co_cellvars, *code.co_freevars}
        self._watched = tuple(watched - self._elsewhere)
        first, room = self.first, STILL_ROOM
        parts: tuple[list[str], list[str]] = ([], [])
        for name in self.kept.keys() - watched:
            text = self.kept[name].text
            room -= len(text) + len(name)
            if room > 0:
                parts[first.get(name) == text].append(f'"{name}":{text}')
        self._note_change()
        self._still = changed, others = ",".join(parts[0]), ",".join(parts[1])
        self.still_text = f'["{self.name}",{{{changed}}},{{{others}}}]'

    def _find_elsewhere(self) -> None:
        """Find the names that are left to others."""
        self._held = held = self._script.held
        # Python's own dict in a module would be looked at in each step, as it may change
        code, names = self.frame.f_code, {*self._script.ignored, "__annotations__"}
        if code.co_name == "<module>":
            module = self.frame.f_globals.get("__name__")
            prefix = "" if module == "__main__" else f"{module}."
            names |= {each.removeprefix(prefix) for each in held if each.startswith(prefix)}
        elif code.co_freevars:
            prefix = code.co_qualname.rpartition(".<locals>.")[0]
            names |= {each for each in code.co_freevars if f"{prefix}.{each}" in held}
        self._elsewhere = frozenset(names)
        self.forget()

    def _keep(self, name: str, value: Any) -> Kept | None:
        try:
            return self._kept(name, value)
        except Exception:  # noqa: BLE001  a comparison of the script's own, a thread that changes it
            return None

    def _kept(self, name: str, value: Any) -> Kept | None:
        if name in self._elsewhere or value is _UNSET:
            return None
        kind, kept = type(value), self.kept.get(name)
        if kind in FIXED:
            if kept is not None and value is kept.value and value is not None:
                return kept
            return None if name[:2] == "__" else _kept_fixed(value, kind)
        if self._is_refused(name, value) or self._script.is_registered(value):
            return None
        of = class_of(kind) if kind.__module__ not in _CONTAINERS_IN else ""
        content = vars(value) if of else value
        kind = dict if of else kind
        is_alike = kept is not None and type(kept.value) is kind and kind in _CONTAINERS
        if kept is not None and is_alike and _is_same(content, kept):
            return kept if kept.at == id(value) else kept._replace(at=id(value))
        self._most_bytes = _CARRIED_BYTES if name in self.role.steering else _VALUE_BYTES
        found = self._grown(name, content, of) or self._pack(content, kind, of)
        if found is None and not isinstance(value, Tensor):
            self._refused[name] = id(value), _size(value)
        return found and found._replace(at=id(value))

    def _is_refused(self, name: str, value: Any) -> bool:
        """Whether this could not be kept before; to weigh it may take long."""
        refused = self._refused.get(name)
        return refused is not None and refused[0] == id(value) and refused[1] <= _size(value)

    def _grown(self, name: str, value: Any, of: str) -> Kept | None:
        """A value with long lists; ``None``: it has none, or has tensors."""
        if not is_growing(value):
            self._growing.pop(name, None)
            return None
        text = self._growing.setdefault(name, GrowingText()).text(value, "v")
        if text is None or len(text) > TEXT_ROOM:
            return None
        inside = value.values() if type(value) in MAPPINGS else value
        are_fixed = FIXED.issuperset(map(type, inside))
        inner = [] if are_fixed else [id(each) for each in inside if type(each) not in FIXED]
        return Kept(None, f"[{text},{{}}{_class_text(of)}]", inner=frozenset(inner))

    def _pack(self, value: Any, kind: type, of: str) -> Kept | None:
        self._has_arrays = kind not in _CONTAINERS
        if self._weight(value, _ITEMS) < 0:
            return None
        try:
            encoded, tensors = state_json.encode(value, "v")
            packed = {each: state_json.pack(tensor) for each, tensor in tensors.items()}
            text = f"[{state_json.dumps(encoded)},{state_json.dumps(packed)}{_class_text(of)}]"
        except (TypeError, ValueError, RuntimeError):
            return None
        if len(text) > TEXT_ROOM * (1 + 5 * self._has_arrays):
            return None
        inside = value.values() if kind in MAPPINGS else value if kind in _CONTAINERS else ()
        inner = frozenset(id(each) for each in inside if type(each) not in FIXED)
        return Kept(None if self._has_arrays else copied(value), text, inner=inner)

    def _weight(self, value: Any, room: int, depth: int = 0) -> int:
        """The room that is left beside this value; negative: too large, or nothing plain."""
        kind, cost = type(value), _NESTED if depth > 1 else 1
        if kind in FIXED:
            is_long = kind in {str, bytes} and len(value) > _VALUE_BYTES
            return -1 if is_long else room - cost
        if kind in _CONTAINERS:
            if len(value) * cost > room or depth > _DEEP:
                return -1
            for each in list(value.values()) if kind in MAPPINGS else value:
                room = self._weight(each, room, depth + 1)
                if room < 0:
                    break
            return room
        self._has_arrays = True
        if isinstance(value, Tensor):
            return room - _TENSOR if self._is_own(value) else -1
        is_numpy = kind.__module__ == "numpy" and hasattr(value, "nbytes")
        return room - _TENSOR if is_numpy and value.nbytes <= self._most_bytes else -1

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether the tensor is small, and a copy can stand for it."""
        return (
            type(tensor) is Tensor
            and (tensor.is_cpu or self.may_wait)
            and tensor.nbytes <= self._most_bytes
            and not (tensor.requires_grad and tensor.is_leaf)
            and tensor.layout is torch.strided
            # no view of another one; what a reduction returns may have some room more
            and (tensor.untyped_storage().nbytes() == tensor.nbytes or not _is_view(tensor))
            and address(tensor) not in self.role.addresses
        )


def _class_text(of: str) -> str:
    return f',{{"of":{json.dumps(of)}}}' if of else ""


def _kept_fixed(value: Any, kind: type) -> Kept | None:
    if kind in {str, bytes} and len(value) > _VALUE_BYTES:
        return None
    if (kind is int and abs(value) < _PLAIN_INT) or (kind is float and isfinite(value)):
        return Kept(value, f"[{value!r},{{}}]")
    is_json = kind in {bool, type(None), str}
    encoded = value if is_json else state_json.encode(value, "v")[0]
    return Kept(value, f"[{json.dumps(encoded)},{{}}]")


def _is_same(value: Any, kept: Kept) -> bool:
    """Whether a container holds what was kept of it."""
    try:
        if not _is_plain(value) or value != kept.value:
            return False
        return not isinstance(value, dict) or list(value) == list(kept.value)
    except (RuntimeError, ValueError):  # a thread changes it; or it contains itself
        return False


def _is_plain(value: Any) -> bool:
    """Whether there are no tensors in a container: to compare a DTensor may be a collective."""
    inside = value.values() if type(value) in MAPPINGS else value
    return all(
        type(each) in FIXED or (type(each) in _CONTAINERS and _is_plain(each)) for each in inside
    )


def is_function(frame: FrameType) -> bool:
    """Whether this is a function's frame: its variables are set through a copy of them."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def class_of(kind: type) -> str:
    """The name of a plain class of the script's own, an average meter, say; empty: it is another.

    Its objects are their attributes and nothing else, so they can be made again from them.
    """
    for base in kind.__mro__[:-1]:
        module = sys.modules.get(base.__module__)
        file = getattr(module, "__file__", None)
        is_empty = base.__module__ in {"abc", "typing"}
        if not is_empty and (file is None or is_library(file) or "__slots__" in vars(base)):
            return ""
    return f"{kind.__module__}:{kind.__qualname__}" if kind.__dictoffset__ != 0 else ""


def named_class(name: str) -> type | None:
    """The class that :func:`class_of` named; ``None``: there is none now."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and class_of(found) == name else None


def _size(value: Any) -> int:
    return len(value) if type(value) in _CONTAINERS else -1


def _is_view(tensor: Tensor) -> bool:
    return tensor._is_view()  # noqa: SLF001  torch has no public one


def address(tensor: Tensor) -> int:
    """Of the memory that it is in; 0: it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a kind without memory of its own
        return 0
