"""What each rank keeps of its own at every commit: ``state.own``, small registered objects."""

from __future__ import annotations

import json
import marshal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from worker_hooks.contract.script_record import REGISTERED
from worker_hooks.script import values
from worker_hooks.script.growing import PLAIN
from worker_hooks.script.values import Packed
from worker_hooks.script.watch import TOUCHED, Variable
from worker_hooks.tensors import state_json
from worker_hooks.tensors.state_json import Json
from worker_hooks.tensors.tensor_bytes import entry_of, to_bytes

PAUSE = 15
"""For so many looks, two in a step, an object is left alone that was found to be large."""


class OwnValues:
    """A script's own values: numbers, texts, small tensors and arrays, and containers of these.

        state.own.setdefault(best=0.0, bad_epochs=0)      # at the begin of train
        state.own.best = max(state.own.best, accuracy)

    Random number generators are saved, too. A value may also be changed in place.
    """

    __slots__ = ("__dict__", "_name")

    def __init__(self, name: str) -> None:
        """``name``: as the script spells it, for messages."""
        object.__setattr__(self, "_name", name)

    def setdefault(self, **defaults: Any) -> None:
        """Assign those that have no value yet: neither from this run nor from a checkpoint."""
        for name, value in defaults.items():
            if name not in vars(self):
                setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign a value.

        Raises:
            TypeError: it cannot be saved.
            ValueError: it is too large, or the name is that of a method.
        """
        full = f"{self._name}.{name}"
        if name.startswith("_") or name == "setdefault":
            raise ValueError(f"{full} cannot be assigned: choose a name without _ at its begin")
        values.check_own(value, full)
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked by Python itself, of an object without attributes
            raise AttributeError(name)
        raise AttributeError(
            f"{self._name}.{name} has no value yet: give it one with "
            f"{self._name}.setdefault({name}=...)"
        )


class ObjectStates(Protocol):
    """Registered objects that may differ between ranks, by name."""

    def names(self) -> list[str]:
        """Of all of them."""

    def small(self, name: str, title: str) -> tuple[Json, Mapping[str, Tensor]] | None:
        """The present state as JSON and tensors in host memory; ``None``: those are large.

        ``title``: what the names of the tensors begin with.
        """

    def load(self, name: str, state: Any) -> None:
        """Put a state back."""

    def is_of(self, name: str, thing: object) -> bool:
        """Whether this is the object, or one that it holds as an attribute."""


class RegisteredObjects:
    """The states of registered objects, of which each rank keeps its own as long as it is small.

    Nobody knows when such an object begins to differ between ranks, so it is kept from the first.
    """

    def __init__(self, states: ObjectStates | None) -> None:
        """Nothing is kept yet."""
        self._states = states
        names = [] if states is None else states.names()
        found = (Variable(f"{REGISTERED}{each}", {}, each) for each in names)
        self.variables = {each.name: each for each in found}
        self._paused: dict[str, int] = {}  # large ones -> for how many looks they are left alone

    @property
    def kept(self) -> set[str]:
        """The full names of those that are kept."""
        return {name for name, each in self.variables.items() if each.packed is not None}

    @property
    def left_out(self) -> set[str]:
        """Those that are too large, on a device, or cannot be read."""
        return self.variables.keys() - self.kept

    def leave_out(self, is_ignored: Callable[[str], bool]) -> None:
        """Forget those that the script does not want to be looked at."""
        self.variables = {n: each for n, each in self.variables.items() if not is_ignored(n)}

    def changed(self) -> list[Variable]:
        """Those that have changed since this was asked last, packed.

        One that was large is not looked at again at once: to find that out takes long.
        """
        return [each for each in self.variables.values() if self._is_due(each) and self._look(each)]

    def _is_due(self, variable: Variable) -> bool:
        left = self._paused.pop(variable.name, 0)
        if left:
            self._paused[variable.name] = left - 1
        return not left

    def is_changing(self, entry: object) -> bool:
        """Whether the main thread is in a method of one of them, which may be half done.

        Args:
            entry: the code or the frame that trains; it may be a method of such an object itself.
        """
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
        while self.variables and frame is not None and frame is not entry is not frame.f_code:
            if names := frame.f_code.co_varnames[: frame.f_code.co_argcount]:
                first = frame.f_locals.get(names[0])
                if any(self._is_of(each, first) for each in self.variables.values()):
                    return True
            frame = frame.f_back
        return False

    def _is_of(self, variable: Variable, thing: object) -> bool:
        assert self._states is not None
        return self._states.is_of(variable.key, thing)

    def _look(self, variable: Variable) -> bool:
        assert self._states is not None
        try:
            state = self._states.small(variable.key, variable.name)
            value, tensors = ({}, {}) if state is None else state
            # an object may return other tensors each time, so what is in them is compared
            contents = [bytes(to_bytes(each)) for each in tensors.values()]
            entries = tuple(entry_of(name, each) for name, each in tensors.items())
            mark = None if state is None else (marshal.dumps(value, PLAIN), entries, contents)
            if mark == variable.mark:
                return False
            variable.mark = mark
            text = "" if mark is None else state_json.dumps(value)
            is_large = len(text) > 2 * values.LARGE_BYTES or mark is None
            if is_large:
                self._paused[variable.name] = PAUSE
            variable.packed = None if is_large else Packed(text, entries, b"".join(contents))
        except Exception:  # noqa: BLE001  the script's own code; the commit says what it raises
            variable.mark = variable.packed = None
        variable.checksum = TOUCHED if variable.packed is None else variable.packed.checksum
        return True

    def put(self, variable: Variable, text: Any, tensors: Mapping[str, Tensor]) -> None:
        """Put a state back that was kept, unless it is there: to load it may do more than that.

        Raises:
            ValueError: it is none.
            RuntimeError: the object does not take it.
        """
        assert self._states is not None
        self._look(variable)
        if _is_same(variable.packed, text, tensors):
            variable.was = variable.checksum
            return
        state = values.unpack(text, tensors, None)
        try:
            self._states.load(variable.key, state)
        except ValueError as error:  # else it would be half of this state, and half of another
            raise RuntimeError(f"{variable.name} cannot be restored: {error}") from error
        self._look(variable)
        variable.was = variable.checksum


def _is_same(packed: Packed | None, text: Any, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a value is this saved one; ``tensors`` has those of others, too."""
    if packed is None or json.loads(packed.text) != text:
        return False
    names = [each.name for each in packed.entries]
    if not all(name in tensors for name in names):
        return False
    saved = tuple(entry_of(name, tensors[name]) for name in names)
    content = b"".join(bytes(to_bytes(tensors[name])) for name in names)
    return (saved, content) == (packed.entries, packed.content)
