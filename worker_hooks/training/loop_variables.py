"""The variables of the script's frames around its loop, kept at each commit.

Every entry into the training function begins with new variables: on a survivor of a replacement, on
a new rank and after a restart alike. Those that hold plain values (numbers, texts, small tensors,
containers of them, objects of the script's own classes) are saved with a rank's place in its data
and put back where its loop continues: a running mean, a counter, the ``loss`` that is printed
behind the loop. Globals and closures are saved by :class:`ScriptValues`, and not here once more. A
variable that matters and is kept in neither place is named before the first death.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from worker_hooks.recovery.resume import SavedVariables
from worker_hooks.script import values as own_values
from worker_hooks.script.kept import ScriptValues
from worker_hooks.script.source import Named
from worker_hooks.state.snapshot import FIXED, copied
from worker_hooks.tensors import state_json
from worker_hooks.training.script_frames import (
    LoopNames,
    frames_of_script,
    is_library,
    names_of_loop,
)

ROOM = 60 << 10  # characters for all variables of a commit
CARRIED_ROOM = 600 << 10  # more for those that training depends on, such as a batch fetched ahead
_VALUE_BYTES = 1024  # of a text, of a tensor
_CARRIED_BYTES = 128 << 10  # of a tensor that training depends on
_ITEMS = 8192  # of all containers in a value
_LOOPS = 4  # ended ones of an epoch whose variables are kept
_PLAIN_INT = 1 << 53  # beyond it JSON of others has no exact numbers
_ENDS = "],{}]"  # of the text of a list without tensors
_MAPPINGS = {dict, OrderedDict, Counter, defaultdict}
_CONTAINERS = {*_MAPPINGS, list, tuple, set, frozenset, deque}
_CONTAINERS_IN = {"builtins", "collections", "numpy", "torch"}
_IS_COPY = sys.version_info < (3, 13)  # ``f_locals`` of a function is a copy of its variables


_UNSET = object()  # a variable without a value


class _Kept(NamedTuple):
    value: Any  # a copy, if it may change in place; ``None`` for what is always read anew
    text: str  # JSON: the encoded value, and its tensors by name


class LoopVariables:
    """What one rank's script keeps in variables. Only the main thread uses it."""

    def __init__(
        self, registered: Callable[[], Iterable[Tensor]], script: ScriptValues | None = None
    ) -> None:
        """``registered`` returns the tensors that are saved anyway, ``script`` keeps the rest."""
        self.text = b""  # of the newest commit: fields of a JSON object, a comma in front
        self._registered = registered
        self._script = ScriptValues() if script is None else script
        self._frames: list[FrameType] = []  # the innermost first
        self._loop = LoopNames()
        self._asked_at: list[tuple[CodeType, int]] | None = None  # a loop of the script's own
        self._addresses: set[int] = set()  # of registered memory
        self._first: dict[tuple[int, str], dict[str, str]] = {}  # texts when a frame was first seen
        self._known: dict[tuple[int, str], dict[str, _Kept]] = {}
        self._before: dict[int, str] = {}  # by loop of the epoch, as of its end
        self._newest = "[]"
        self._has_arrays = False  # in the value that was weighed last
        self._most_bytes = _VALUE_BYTES  # of a tensor in the value that is weighed
        self._carried: dict[tuple[int, str], dict[str, Named]] = {}  # what matters, by frame
        self._always: dict[tuple[int, str], frozenset[str]] = {}  # what is read at each commit
        self._elsewhere: dict[tuple[int, str], frozenset[str]] = {}  # saved by others, or ignored
        self._held: frozenset[str] | None = None  # those are up to date with it
        self._without_loop: set[CodeType] = set()
        self._lost: dict[tuple[str, str, int], Named | None] = {}  # ``None``: it was told
        self._steering: dict[tuple[int, str], frozenset[str]] = {}  # training depends on them
        self._steering_text = "[]"
        self._committed: dict[tuple[int, str], dict[str, str]] = {}  # of those, as of the commit
        self._moving: set[tuple[tuple[int, str], str]] = set()  # of those, ever changed by a step

    def begin_epoch(self) -> None:
        """Loops are counted anew."""
        self._before.clear()

    def enter(self, frame: FrameType | None, *, is_own: bool = False) -> None:
        """A loop begins; call it before :meth:`put_back`.

        Args:
            frame: waits for the first batch, or asks whether to exit.
            is_own: the loop is the script's own, and calls :meth:`asked`.
        """
        self._frames = frames_of_script(frame)
        self._asked_at = self._places() if is_own else None
        is_loop = self._frames and not is_own
        self._loop = names_of_loop(self._frames[0]) if is_loop else LoopNames()
        self._addresses = {_address(tensor) for tensor in self._registered()}
        self._held = None
        self._committed.clear()
        for key, each in self._keyed():
            named = self._carried[key] = self._carried_in(each)
            self._always[key] = self._loop.carried | (named.keys() - self._loop.after)
            self._steering[key] = self._steering_in(each)
        self._set_steering_text()
        for key, each in self._keyed():
            if key not in self._first:
                found = self._read(key, each, is_last=True)
                self._first[key] = {name: kept.text for name, kept in found}

    def asked(self, frame: FrameType) -> None:
        """The script's own loop is at the end of a step.

        Its frames are those that it had as it asked first. The variables are put back where it asks
        first, so they are kept only if it does so in the same place.
        """
        now, count = frames_of_script(frame), 0
        if self._asked_at is None or not self._frames:
            return
        for one, other in zip(reversed(now), reversed(self._frames), strict=False):
            if one is not other:
                break
            count += 1
        if count < len(self._frames):
            self._frames = self._frames[len(self._frames) - count :]
            self._set_steering_text()
        if not count or self._places() != self._asked_at[-count:]:
            self._frames, self.text = [], b""
            self.has_no_loop(frame)

    def continue_from(self, saved: SavedVariables) -> None:
        """Loops of the epoch had ended before."""
        self._before = {int(loop): json.dumps(each) for loop, each in saved.before.items()}

    def leave(self, loop: int) -> None:
        """The loop is over, or was left."""
        if self._frames:
            self._before[loop] = self._newest
            if len(self._before) > _LOOPS:
                del self._before[next(iter(self._before))]
        self._frames = []

    def capture(self, *, is_last: bool) -> None:
        """A commit: keep the present values.

        Args:
            is_last: perhaps the last one of the loop. What is on a device, and not carried from
                one batch to the next, is kept only then, because to read it is to wait for it.
        """
        if not self._frames:
            return
        self._newest = self._encoded(is_last=is_last)
        self.text = self._fields(self._newest)
        for key, _ in self._keyed():
            if steering := self._steering[key]:
                found, was = self._known[key], self._committed.get(key, {})
                now = {name: found[name].text for name in steering & found.keys()}
                self._moving |= {(key, name) for name in was if was[name] != now.get(name)}
                self._committed[key] = now

    def settled(self) -> bytes | None:
        """The main thread is blocked behind the step's update: what it has changed until then.

        Returns:
            As :attr:`text`; ``None``: what training depends on has yet to change, as it usually
            does before the commit.
        """
        if not self._frames:
            return self.text
        newest = self._encoded(is_last=True)
        for key, name in self._moving:
            kept = self._known.get(key, {}).get(name)
            if key in self._committed and self._committed[key].get(name) == (kept and kept.text):
                return None
        return self._fields(newest) + b', "is_settled": true'

    def _encoded(self, *, is_last: bool) -> str:
        rooms = [ROOM - sum(map(len, self._before.values())), CARRIED_ROOM]
        texts = []
        for key, frame in self._keyed():
            first, parts = self._first.get(key, {}), cast("tuple[list[str], list[str]]", ([], []))
            steering = self._steering[key]
            for name, kept in self._read(key, frame, is_last=is_last):
                which = name in steering
                rooms[which] -= len(kept.text) + len(name) + 4
                if rooms[which] > 0:
                    parts[first.get(name) == kept.text].append(f'"{name}":{kept.text}')
                elif name in self._carried[key]:
                    self._note_lost(self._carried[key][name], None)
            changed, others = (",".join(part) for part in parts)
            texts.append(f'["{key[1]}",{{{changed}}},{{{others}}}]')
        return f"[{','.join(texts)}]"

    def _fields(self, frames: str) -> bytes:
        before = ",".join(f'"{loop}":{text}' for loop, text in self._before.items())
        steering = self._steering_text
        return f', "frames": {frames}, "before": {{{before}}}, "steering": {steering}'.encode()

    def lost(self) -> list[Named]:
        """What the loop carries, or what follows it uses, and nothing keeps; each is told once."""
        if not self._lost:
            return []
        found = [each for each in self._lost.values() if each is not None]
        self._lost = dict.fromkeys(self._lost)
        return found

    def has_no_loop(self, frame: FrameType) -> None:
        """A step is made in these frames without a loop over batches: none of them is kept."""
        for each in frames_of_script(frame):
            if each.f_code in self._without_loop:
                return
            self._without_loop.add(each.f_code)
            for name, named in self._carried_in(each).items():
                self._note_lost(named, each.f_locals.get(name))

    def put_back(
        self, saved: SavedVariables, frame: FrameType | None, loop: int | None = None
    ) -> list[str]:
        """Put the values of a checkpoint into the frames around a loop.

        Args:
            saved: the checkpoint's.
            frame: waits for the loop's first batch.
            loop: one that was over; ``None``: it is the one that continues.

        Returns:
            The names of what had changed in training, and was put back.
        """
        is_exact = loop is None or str(loop) in saved.before
        frames = saved.frames if loop is None else saved.before.get(str(loop), saved.frames)
        found: list[str] = []
        present_ones = reversed(frames_of_script(frame))  # the outermost is the training function
        for present, (name, changed, others) in zip(present_ones, reversed(frames), strict=False):
            if present.f_code.co_qualname != name:
                break
            ignored = self._script.ignored
            both = {**others, **changed}
            every = {each: both[each] for each in both if each not in ignored}
            _put(present, every, changed if is_exact else ())
            found += [each for each in changed if each in every]
        return found

    def _carried_in(self, frame: FrameType) -> dict[str, Named]:
        """Variables of a frame without which training would continue in another way, by name."""
        code = frame.f_code
        is_own = self._asked_at is not None or not self._frames
        is_loop = not is_own and frame is self._frames[0]
        named = {e.name: e for e in self._script.findings.carried if e.is_in(code)}
        if is_loop:
            first = 0 if code.co_name == "<module>" else code.co_firstlineno
            for name in self._loop.after - named.keys():
                named[name] = Named(name, code.co_filename, frame.f_lineno, False, first)
        mine = {*code.co_varnames, *code.co_cellvars} if _is_function(frame) else set()
        for name in mine & (self._loop.given if is_loop else mine if is_own else set()):
            if own_values.is_generator(frame.f_locals.get(name)):  # each draw changes it
                line = code.co_firstlineno
                named[name] = Named(name, code.co_filename, frame.f_lineno, False, line)
        return named

    def _steering_in(self, frame: FrameType) -> frozenset[str]:
        """Those that the loop carries, and that flow into more than output."""
        found = [each for each in self._script.findings.carried if each.is_in(frame.f_code)]
        return frozenset(e.name for e in found if not e.is_only_printed) - self._script.ignored

    def _note_lost(self, named: Named, value: Any) -> None:
        """It is not kept here; ``None``: for want of room."""
        if value is _UNSET:
            return
        key, kind = (named.name, named.file, named.line), ""
        is_left = named.name in self._script.ignored or self._script.is_registered(value)
        if key in self._lost or is_left:
            return
        try:
            own_values.check_own(value, named.name)
        except Exception:  # noqa: BLE001  values of any kind
            kind = type(value).__name__
        is_global = named.function == 0
        if is_global and named.name not in self._script.findings.temporary:
            # others keep it, or have named it
            if not kind or _is_of_script(type(value)) or named.name in self._script.large:
                return
            self._script.large.add(named.name)
        self._lost[key] = named._replace(kind=kind)

    def _find_elsewhere(self) -> None:
        """Find the names in each frame that are left to others."""
        self._held = held = self._script.held
        for key, frame in self._keyed():
            code, names = frame.f_code, set(self._script.ignored)
            if code.co_name == "<module>":
                module = frame.f_globals.get("__name__")
                prefix = "" if module == "__main__" else f"{module}."
                names |= {each.removeprefix(prefix) for each in held if each.startswith(prefix)}
            elif code.co_freevars:
                prefix = code.co_qualname.rpartition(".<locals>.")[0]
                names |= {each for each in code.co_freevars if f"{prefix}.{each}" in held}
            self._elsewhere[key] = frozenset(names)

    def _keyed(self) -> Iterable[tuple[tuple[int, str], FrameType]]:
        outermost = len(self._frames) - 1
        for place, frame in enumerate(self._frames):
            yield (outermost - place, frame.f_code.co_qualname), frame

    def _places(self) -> list[tuple[CodeType, int]]:
        # lines: the condition of a ``while`` is there twice in a function's code
        return [(each.f_code, each.f_lineno) for each in self._frames]

    def _set_steering_text(self) -> None:
        steering = [sorted(self._steering[key]) for key, _ in self._keyed()]
        self._steering_text = json.dumps(steering)

    def _read(
        self, key: tuple[int, str], frame: FrameType, *, is_last: bool
    ) -> Iterable[tuple[str, _Kept]]:
        if self._held is not self._script.held:
            self._find_elsewhere()
        known, values, elsewhere = self._known.get(key, {}), frame.f_locals, self._elsewhere[key]
        carried, always = self._carried[key], self._always[key]
        steering = self._steering[key]
        found: dict[str, _Kept] = {}
        heavy, later = [], set()
        for name, value in values.items():
            if type(value) not in FIXED and isinstance(value, Tensor):
                heavy.append(name)
                if not (is_last or value.device.type == "cpu" or name in always):
                    later.add(name)
                    continue
            if name in elsewhere:
                continue
            self._most_bytes = _CARRIED_BYTES if name in steering else _VALUE_BYTES
            kept = self._keep(name, value, known.get(name))
            if kept is not None:
                found[name] = kept
        for name in carried.keys() - found.keys() - elsewhere - later:
            self._note_lost(carried[name], values.get(name, _UNSET))
        if _IS_COPY and _is_function(frame):
            for name in heavy:  # else the copy would keep their memory for a step more
                del values[name]
        self._known[key] = found
        return found.items()

    def _keep(self, name: str, value: Any, kept: _Kept | None) -> _Kept | None:
        kind = type(value)
        if kind in FIXED:
            if kept is not None and value is kept.value and value is not None:
                return kept
            return None if name[:2] == "__" else _kept_fixed(value, kind)
        if self._script.is_registered(value):
            return None
        is_object = kind.__module__ not in _CONTAINERS_IN and _is_of_script(kind)
        if is_object:
            value, kind = vars(value), dict
        if kept is not None and type(kept.value) is kind and kind in _CONTAINERS:
            same = _unchanged(value, kept)
            if same is not None:
                return same
        return self._pack(value, kind, is_object=is_object)

    def _pack(self, value: Any, kind: type, *, is_object: bool) -> _Kept | None:
        self._has_arrays = kind not in _CONTAINERS
        if self._weight(value, _ITEMS) < 0:
            return None
        try:
            encoded, tensors = state_json.encode(value, "v")
            packed = {each: state_json.pack(tensor) for each, tensor in tensors.items()}
            text = state_json.dumps([encoded, packed, *["object"] * is_object])
        except (TypeError, ValueError, RuntimeError):
            return None
        return _Kept(None if self._has_arrays else copied(value), text)

    def _weight(self, value: Any, room: int) -> int:
        """The room that is left beside this value; negative: too large, or nothing plain."""
        kind = type(value)
        if kind in FIXED:
            return room - 1 if kind not in {str, bytes} or len(value) <= _VALUE_BYTES else -1
        if kind in _CONTAINERS:
            if len(value) > room:
                return -1
            for each in value.values() if kind in _MAPPINGS else value:
                room = self._weight(each, room)
                if room < 0:
                    break
            return room
        self._has_arrays = True
        if isinstance(value, Tensor):
            return room - 1 if self._is_own(value) else -1
        is_numpy = kind.__module__ == "numpy" and hasattr(value, "nbytes")
        return room - 1 if is_numpy and value.nbytes <= self._most_bytes else -1

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether the tensor is small, and a copy can stand for it."""
        return (
            type(tensor) is Tensor
            and tensor.nbytes <= self._most_bytes
            and not (tensor.requires_grad and tensor.is_leaf)
            and tensor.layout is torch.strided
            # no view of another one; what a reduction returns may have some room more
            and (tensor.untyped_storage().nbytes() == tensor.nbytes or not _is_view(tensor))
            and _address(tensor) not in self._addresses
        )


def _kept_fixed(value: Any, kind: type) -> _Kept | None:
    if kind in {str, bytes} and len(value) > _VALUE_BYTES:
        return None
    is_json = kind in {bool, type(None), str} or (kind is int and abs(value) < _PLAIN_INT)
    encoded = value if is_json else state_json.encode(value, "v")[0]
    return _Kept(value, f"[{json.dumps(encoded)},{{}}]")


def _unchanged(value: Any, kept: _Kept) -> _Kept | None:
    """What was kept of a container, if it holds the same, or the same and more."""
    try:
        if value == kept.value:
            return kept
        return _grown(value, kept) if type(value) is list else None
    except (RuntimeError, ValueError):  # there are arrays in it by now
        return None


def _grown(value: list[Any], kept: _Kept) -> _Kept | None:
    """A list that was only appended to, as one of losses: what was there is not encoded again."""
    count = len(kept.value)
    news = (
        []
        if value[:count] != kept.value
        else [_kept_fixed(v, type(v)) for v in value[count:] if type(v) in FIXED]
    )
    if not count or not news or len(news) != len(value) - count or None in news:
        return None
    texts = ",".join(one.text.removeprefix("[").removesuffix(",{}]") for one in news if one)
    return _Kept(value[:], f"{kept.text.removesuffix(_ENDS)},{texts}{_ENDS}")


def _put(frame: FrameType, every: Mapping[str, Any], changed: Iterable[str]) -> None:
    """Set the variables that had changed, and those that the frame lacks."""
    values = frame.f_locals
    for name, saved in every.items():
        if name not in changed and name in values:
            continue
        encoded, packed, *is_object = saved
        tensors = {each: state_json.unpack(*one) for each, one in packed.items()}
        value, present = state_json.decode(encoded, tensors), values.get(name)
        if not is_object:
            values[name] = _in_place(present, value)
        elif hasattr(present, "__dict__"):
            vars(present).clear()
            vars(present).update(value)
    if _IS_COPY and _is_function(frame):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _in_place(present: Any, value: Any) -> Any:
    """The present container with the new items, as other variables may refer to it, too."""
    kind = type(value)
    if type(present) is not kind:
        return value
    if kind is list:
        present[:] = value
    elif kind in _MAPPINGS or kind is set:
        present.clear()
        present.update(value)
    else:
        return value
    return present


def _is_function(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _is_of_script(kind: type) -> bool:
    """Whether objects of this type are plain ones of the script's: an average meter, say."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return file is not None and not is_library(file) and kind.__dictoffset__ != 0


def _is_view(tensor: Tensor) -> bool:
    return tensor._is_view()  # noqa: SLF001  torch has no public one


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a kind without memory of its own
        return 0
