"""What each rank keeps of its own at every commit: ``state.own``, small registered objects."""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import quote, unquote

from torch import Tensor

from worker_hooks.contract.script_record import BUFFERS, REGISTERED
from worker_hooks.machine.thread_frames import main_frame
from worker_hooks.script import values
from worker_hooks.script.growing import PLAIN
from worker_hooks.script.values import Packed
from worker_hooks.script.watch import TOUCHED, Group, Variable
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
        frame = main_frame()
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


class BufferPlace(Protocol):
    """Where a module keeps a buffer."""

    @property
    def tensor(self) -> Tensor | None:
        """The present one."""

    def put(self, tensor: Tensor | None) -> None:
        """Set another one."""


class _Buffers:
    """Buffers by their names, in which no dot is, as an attribute's name has none."""

    def __init__(self, find: Callable[[str], BufferPlace | None]) -> None:
        self._find = find

    def get(self, key: str, default: Any) -> Any:
        """The present tensor."""
        place = self._find(unquote(key))
        return default if place is None else place.tensor

    def __setitem__(self, key: str, value: Any) -> None:
        place = self._find(unquote(key))
        if place is not None:
            place.put(value)

    def pop(self, key: str, default: Any) -> Any:
        """A buffer stays: its first size is what the page has of it."""

    def __contains__(self, key: str) -> bool:
        return self._find(unquote(key)) is not None

    def __len__(self) -> int:
        return 0  # nothing is found here but by name

    def __iter__(self) -> Iterator[str]:
        return iter(())


class _Buffer(Variable):
    """One of them, of any size: its bytes are compared, as it may change uncounted."""

    __slots__ = ()

    def look(self, excluded: Collection[int] = ()) -> bool:  # noqa: ARG002  it is registered
        """Whether it has changed since it was seen last."""
        was, self.value = self.mark, self.holder.get(self.key, None)
        tensor, self.is_fixed = self.value, False
        self.mark = tensor is not None and (entry_of("", tensor), bytes(to_bytes(tensor)))
        return bool(self.mark != was)

    def pack(self) -> None:
        """Take the present one apart."""
        text, tensors = state_json.encode(self.value, self.name)
        entries = tuple(entry_of(name, each) for name, each in tensors.items())
        content = b"".join(bytes(to_bytes(each)) for each in tensors.values())
        self.packed = Packed(state_json.dumps(text), entries, content)
        self.checksum = self.packed.checksum


class ResizedBuffers(Group):
    """Buffers that have another size than their place on the page: kept as a script's values are.

    A buffer that a module adds while training has no place there, and is one of these, too.
    """

    def __init__(self, find: Callable[[str], BufferPlace | None]) -> None:
        """``find``: returns where a buffer of this name is, or would be; ``None``: no module."""
        super().__init__(BUFFERS, _Buffers(find))
        self.names: Collection[str] = frozenset()
        self.asked: list[str] = []
        """Those of the last :meth:`choose`; what no module has a place for is none of the names."""

    @staticmethod
    def name_of(variable: str) -> str:
        """Of the buffer that is saved under this name."""
        return unquote(variable.removeprefix(BUFFERS))

    def choose(self, names: Collection[str]) -> None:
        """Keep these, and no others; in this order a module gets those that it has yet to add."""
        self.asked = [*names]
        keys = {each: quote(each, safe="").replace(".", "%2E") for each in names}
        there = {key: name for name, key in keys.items() if key in self.holder}
        self.names = dict.fromkeys(there.values()).keys()
        was, self.variables = self.variables, {}
        for key in there:
            one = self.variables[key] = was.get(key) or _Buffer(f"{BUFFERS}{key}", self.holder, key)
            if one.packed is None:  # it has changed with this step's forward, and not behind it
                one.look()
                one.pack()
                one.was = one.checksum
        self.forget_variables()


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
