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
import json
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from worker_hooks.recovery.resume import SavedVariables
from worker_hooks.script import values as own_values
from worker_hooks.script.kept import ScriptValues
from worker_hooks.script.source import Named
from worker_hooks.tensors import state_json
from worker_hooks.training.frame_variables import (
    IS_COPY,
    MAPPINGS,
    FrameRole,
    FrameVariables,
    address,
    class_of,
    is_function,
    named_class,
)
from worker_hooks.training.script_frames import (
    LoopNames,
    frames_of_script,
    names_of_loop,
    stored_often,
    suspended,
)

log = logging.getLogger("msrun")

ROOM = 60 << 10  # characters for all variables of a commit
CARRIED_ROOM = 600 << 10  # more for those that training depends on, such as a batch fetched ahead
_LOOPS = 4  # ended ones of an epoch whose variables are kept


class LoopVariables:
    """What one rank's script keeps in variables.

    Only the main thread uses it; while that is blocked, the listener may call :meth:`settled`.
    """

    def __init__(
        self, registered: Callable[[], Iterable[Tensor]], script: ScriptValues | None = None
    ) -> None:
        """``registered`` returns the tensors that are saved anyway, ``script`` keeps the rest."""
        self.text = b""  # of the newest commit: fields of a JSON object, a comma in front
        self._registered = registered
        self._script = ScriptValues() if script is None else script
        self._frames: list[FrameVariables] = []  # the innermost first
        self._asked_at: list[tuple[CodeType, int]] | None = None  # a loop of the script's own
        self._before: dict[int, str] = {}  # by loop of the epoch, as of its end
        self._newest = "[]"
        self._parts: list[Any] = []  # of :attr:`text`
        self._first: dict[tuple[int, str], Mapping[str, str]] = {}  # by depth and function
        self._without_loop: set[CodeType] = set()
        self._lost: dict[tuple[str, str, int], Named | None] = {}  # ``None``: it was told
        self._steering_text = '"steering": []'
        # of variables that training depends on, by frame: texts as of the commit
        self._committed: dict[int, dict[str, str]] = {}
        self._moving: set[tuple[str, str]] = set()  # of those, by function: ever changed by a step

    def begin_epoch(self) -> None:
        """Loops are counted anew."""
        self._before.clear()

    def enter(self, frame: FrameType | None, *, is_own: bool = False) -> None:
        """A loop begins; call it before :meth:`put_back`.

        Args:
            frame: waits for the first batch, or asks whether to exit.
            is_own: the loop is the script's own, and calls :meth:`asked`.
        """
        frames = frames_of_script(frame)
        self._frames = [FrameVariables(each, self._script) for each in frames]
        self._asked_at = self._places() if is_own else None
        still = set() if is_own else suspended(frame)
        addresses = frozenset(address(tensor) for tensor in self._registered())
        for depth, each in enumerate(reversed(self._frames)):
            is_loop = not is_own and each.frame not in still
            loop = names_of_loop(each.frame) if is_loop else LoopNames()
            found = self._found_in(each.frame)
            named = self._carried_in(each.frame, loop, is_own=is_own)
            role = FrameRole(
                carried=named,
                always=loop.carried | (named.keys() - (loop.after - found.keys())),
                steering=frozenset(
                    name
                    for name, one in found.items()
                    if not one.is_only_printed and name not in self._script.ignored
                ),
                written=frozenset() if each.frame in still else loop.written,
                addresses=addresses,
            )
            each.enter(role, self._first.get((depth, each.name)), self._note_lost)
            self._first[depth, each.name] = each.first
        self._set_steering_text()

    def asked(self, frame: FrameType) -> None:
        """The script's own loop is at the end of a step.

        Its frames are those that it had as it asked first. The variables are put back where it asks
        first, so they are kept only if it does so in the same place.
        """
        now, count = frames_of_script(frame), 0
        if self._asked_at is None or not self._frames:
            return
        for one, other in zip(reversed(now), reversed(self._frames), strict=False):
            if one is not other.frame:
                break
            count += 1
        if count < len(self._frames):
            self._frames = self._frames[len(self._frames) - count :]
            self._committed.clear()  # its keys are places
            for each in self._frames:
                each.has_changed = True
            self._set_steering_text()
        if not count or self._places() != self._asked_at[-count:]:
            self._frames, self.text, self._parts = [], b"", []
            self.has_no_loop(frame)

    def continue_from(self, saved: SavedVariables) -> None:
        """Loops of the epoch had ended before."""
        self._before = {int(loop): json.dumps(each) for loop, each in saved.before.items()}

    def abandon(self) -> None:
        """The training function was left amid a step; it is entered again."""
        self._frames = []

    def leave(self, loop: int) -> None:
        """The loop is over, or was left at will: not by an exception, perhaps amid a step."""
        if self._frames:
            self._before[loop] = self._newest
            if len(self._before) > _LOOPS:
                del self._before[next(iter(self._before))]
        self._frames = []

    def capture(self, *, is_last: bool) -> None:
        """A commit: keep the present values.

        Args:
            is_last: perhaps the last one of the loop. Tensors and containers that are made anew for
                each batch are kept only then: what follows the loop may use them.
        """
        if not self._frames:
            return
        self._newest = self._encoded(is_last=is_last)
        for place, each in enumerate(self._frames):
            if each.has_changed and each.role.steering:
                self._find_moving(place, each)
            each.has_changed = False
        parts = [self._newest, self._steering_text, *self._before.items()]
        if parts != self._parts:  # in most steps they are the same, and so is the text
            self.text, self._parts = self._fields(self._newest), parts

    def _find_moving(self, place: int, frame: FrameVariables) -> None:
        """Find what training depends on and this step has changed."""
        kept, was = frame.kept, self._committed.get(place, {})
        now = {name: kept[name].text for name in frame.role.steering if name in kept}
        if now == was:
            return
        self._committed[place] = now
        moved = {(frame.name, name) for name in was if was[name] != now.get(name)}
        if not moved <= self._moving:
            self._moving |= moved
            self._set_steering_text()

    def settled(self) -> bytes | None:
        """The main thread is blocked behind the step's update: what it has changed until then.

        Returns:
            As :attr:`text`; ``None``: what training depends on has yet to change, as it usually
            does before the commit.
        """
        if not self._frames:
            return self.text
        for each in self._frames:  # what a device waits for may never come
            each.may_wait = False
        try:
            newest = self._encoded(is_last=True)
        finally:
            for each in self._frames:
                each.may_wait = True
        for place, each in enumerate(self._frames):
            for name, was in self._committed.get(place, {}).items():
                kept = each.kept.get(name)
                is_moving = (each.name, name) in self._moving
                if is_moving and (kept is None or kept.text == was):
                    return None
        return self._fields(newest) + b', "is_settled": true'

    def _encoded(self, *, is_last: bool) -> str:
        rooms, note = [ROOM - sum(map(len, self._before.values())), CARRIED_ROOM], self._note_lost
        for each in self._frames:
            if not each.is_still:
                each.read(note, is_last=is_last)
        texts = [e.still_text if e.is_still else e.text(rooms, note) for e in self._frames]
        return f"[{','.join(texts)}]"

    def _fields(self, frames: str) -> bytes:
        before = ",".join(f'"{loop}":{text}' for loop, text in self._before.items())
        return f', "frames": {frames}, "before": {{{before}}}, {self._steering_text}'.encode()

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
            for name, named in self._carried_in(each, LoopNames(), is_own=True).items():
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
            for each in self._frames:
                each.forget()
            found += [each for each in changed if each in every]
        return found

    def _carried_in(self, frame: FrameType, loop: LoopNames, *, is_own: bool) -> dict[str, Named]:
        """Variables of a frame without which training would continue in another way, by name."""
        code, named = frame.f_code, self._found_in(frame)
        first = 0 if code.co_name == "<module>" else code.co_firstlineno
        for name in loop.after - named.keys():
            named[name] = Named(name, code.co_filename, frame.f_lineno, False, first)
        mine = {*code.co_varnames, *code.co_cellvars} if is_function(frame) else set()
        for name in mine & (mine if is_own else loop.given):
            if own_values.is_generator(frame.f_locals.get(name)):  # each draw changes it
                line = code.co_firstlineno
                named[name] = Named(name, code.co_filename, frame.f_lineno, False, line)
        return named

    def _found_in(self, frame: FrameType) -> dict[str, Named]:
        """Those of which the source tells that the loop carries them, by name."""
        return {e.name: e for e in self._script.findings.carried if e.is_in(frame.f_code)}

    def _note_lost(self, named: Named, value: Any) -> None:
        """It is not kept here; ``None``: for want of room."""
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
            if not kind or class_of(type(value)) or named.name in self._script.large:
                return
            self._script.large.add(named.name)
        self._lost[key] = named._replace(kind=kind)

    def _places(self) -> list[tuple[CodeType, int]]:
        # lines: the condition of a ``while`` is there twice in a function's code
        return [(each.frame.f_code, each.frame.f_lineno) for each in self._frames]

    def _set_steering_text(self) -> None:
        """What training depends on, by frame, and what of it has ever changed in a step."""
        names = [(each.name, sorted(each.role.steering)) for each in self._frames]
        moving = [[each for each in some if (f, each) in self._moving] for f, some in names]
        steering = json.dumps([some for _, some in names])
        self._steering_text = f'"steering": {steering}, "moving": {json.dumps(moving)}'


def _put(frame: FrameType, every: Mapping[str, Any], changed: Iterable[str]) -> None:
    """Set the variables that had changed, and those that the frame lacks."""
    values, loop = frame.f_locals, names_of_loop(frame)
    rebound = stored_often(frame.f_code) if loop.written is None else loop.written
    aliases = {}
    for name, saved in every.items():
        if name not in changed and name in values:
            continue
        encoded, packed, *how = saved
        about = how[0] if how else {}
        if "same" in about:
            aliases[name] = about["same"]
            continue
        tensors = {each: state_json.unpack(*one) for each, one in packed.items()}
        value, present = state_json.decode(encoded, tensors), values.get(name)
        # other variables may refer to the present one, unless the loop sets the variable anew
        if "of" in about:
            _put_object(values, name, about["of"], value, is_new=name in rebound)
        else:
            values[name] = value if name in rebound else _in_place(present, value)
    values.update({name: values[first] for name, first in aliases.items() if first in values})
    if IS_COPY and is_function(frame):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _put_object(
    values: MutableMapping[str, Any],
    name: str,
    of: str,
    content: Mapping[str, Any],
    *,
    is_new: bool,
) -> None:
    """An object of the script's own with these attributes: the present one, or a new one."""
    present = values.get(name)
    if is_new or class_of(type(present)) != of:
        kind = named_class(of)
        if kind is None:
            log.warning("%s is not restored: there is no class %s", name, of)
            return
        values[name] = present = object.__new__(kind)
    vars(present).clear()
    vars(present).update(content)


def _in_place(present: Any, value: Any) -> Any:
    """The present container with the new items."""
    kind = type(value)
    if type(present) is not kind:
        return value
    if kind is list:
        present[:] = value
    elif kind in MAPPINGS or kind is set:
        present.clear()
        present.update(value)
    else:
        return value
    return present
