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
import zlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from worker_hooks.contract.fingerprint import LATE, RESULT
from worker_hooks.recovery.resume import SavedVariables
from worker_hooks.script import source
from worker_hooks.script import values as own_values
from worker_hooks.script.growing import MAPPINGS
from worker_hooks.script.kept import ScriptValues
from worker_hooks.script.source import Named
from worker_hooks.tensors import state_json
from worker_hooks.training.frame_variables import (
    IS_COPY,
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
EPOCH_BEGIN = -1  # stands for a loop that was over as the epoch began


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
        self._frames: list[FrameVariables] = []  # of the loop; the innermost first
        self._asked_at: list[tuple[CodeType, int]] | None = None  # a loop of the script's own
        self._before: dict[int, str] = {}  # by loop of the epoch, as of its end; see EPOCH_BEGIN
        self._newest = "[]"
        self._parts: list[Any] = []  # of :attr:`text`
        # by depth and function, around a loop over batches and around the loop over epochs
        self._first: dict[tuple[int, str], Mapping[str, str]] = {}
        self._first_of_epochs: dict[tuple[int, str], Mapping[str, str]] = {}
        self._without_loop: set[CodeType] = set()
        self._lost: dict[tuple[str, str, int], Named | None] = {}  # ``None``: it was told
        self._steering_text = '"steering": []'  # a part of :attr:`text`
        # of variables that training depends on, by frame: texts as of the commit
        self._committed: dict[int, dict[str, str]] = {}
        self._moving: set[tuple[str, str]] = set()  # of those, by function: ever changed by a step
        self._late: set[tuple[str, str]] = set()  # ever changed between a backward and its commit
        self._at_backward: list[dict[str, str]] | None = None  # of this step, by frame

    def restart(self) -> None:
        """The training function was left, perhaps amid a step, and is entered again."""
        self._frames = []
        self._before.clear()

    def begin_epoch(self, frame: FrameType | None, saved: SavedVariables | None = None) -> None:
        """Keep what the script makes its loaders from, until the epoch is over.

        ``saved``: where training continues within the epoch: as it began, this was put back.
        """
        self._before.clear()
        # first: what changes is what is not as the script sets it
        frames = self._entered(frame, self._first_of_epochs, _note_nothing)
        if saved is not None and str(EPOCH_BEGIN) in saved.before:
            self.put_back(saved, frame, EPOCH_BEGIN)
        for each in frames:
            each.read(_note_nothing, is_last=True)
        rooms = [ROOM // 2, CARRIED_ROOM // 2]
        texts = [each.text(rooms, _note_nothing) for each in frames]
        self._before[EPOCH_BEGIN] = f"[{','.join(texts)}]"

    def enter(self, frame: FrameType | None, *, is_own: bool = False) -> None:
        """A loop begins; call it before :meth:`put_back`.

        Args:
            frame: waits for the first batch, or asks whether to exit.
            is_own: the loop is the script's own, and calls :meth:`asked`.
        """
        self._frames = self._entered(frame, self._first, self._note_lost, is_own=is_own)
        self._at_backward = None
        self._committed.clear()  # what changed between two loops is no change of a step
        self._asked_at = self._places() if is_own else None
        self._set_steering_text()

    def _entered(
        self,
        frame: FrameType | None,
        first: dict[tuple[int, str], Mapping[str, str]],
        note_lost: Callable[[Named, Any], None],
        *,
        is_own: bool = False,
    ) -> list[FrameVariables]:
        """The script's frames around a loop that begins, the innermost first."""
        present = frames_of_script(frame)
        if self._script.is_found:
            self._script.findings = source.with_frames(self._script.findings, present)
        frames = [FrameVariables(each, self._script) for each in present]
        still = set() if is_own else suspended(frame)
        addresses = frozenset(address(tensor) for tensor in self._registered())
        for depth, each in enumerate(reversed(frames)):
            is_loop = not is_own and each.frame not in still
            loop = names_of_loop(each.frame) if is_loop else LoopNames()
            found = self._found_in(each.frame)
            named = self._carried_in(each.frame, loop, is_own=is_own)
            steering = {
                name: one
                for name, one in found.items()
                if not one.is_only_printed and name not in self._script.ignored
            }
            role = FrameRole(
                carried=named,
                always=loop.carried | (named.keys() - (loop.after - found.keys())),
                steering=frozenset(steering),
                results=frozenset(name for name, one in steering.items() if one.is_result),
                written=frozenset() if each.frame in still else loop.written,
                addresses=addresses,
            )
            each.enter(role, first.get((depth, each.name)), note_lost)
            first[depth, each.name] = each.first
        return frames

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
            self._at_backward = None
            for each in self._frames:
                each.has_changed = True
            self._set_steering_text()
        if not count or self._places() != self._asked_at[-count:]:
            self._frames, self.text, self._parts = [], b"", []
            self.has_no_loop(frame)

    def continue_from(self, saved: SavedVariables) -> None:
        """Loops of the epoch had ended before."""
        self._before = {int(loop): json.dumps(each) for loop, each in saved.before.items()}

    def leave(self, loop: int) -> None:
        """The loop is over, or was left at will: not by an exception, perhaps amid a step."""
        if self._frames:
            self._before[loop] = self._newest
            ended = [each for each in self._before if each != EPOCH_BEGIN]
            if len(ended) > _LOOPS:
                del self._before[ended[0]]
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
        self._at_backward = None
        parts = [self._newest, self._steering_text, *self._before.items()]
        if parts != self._parts:  # in most steps they are the same, and so is the text
            self.text, self._parts = self._fields(self._newest), parts

    def under_way(self) -> bytes:
        """Backward begins: as :attr:`text`, and what training depends on as it is now.

        Should the rank die before its commit, it is known what the step had changed until here.
        """
        if not any(each.role.steering for each in self._frames):
            return self.text
        for each in self._frames:
            if each.role.steering and not each.is_still:
                each.read(self._note_lost, is_last=False, only=each.role.steering)
        self._at_backward = [self._steered(each) for each in self._frames]
        parts = []
        for place, now in enumerate(self._at_backward):
            was = self._committed.get(place, {})
            since = [f'"{name}":{now[name]}' for name in now if now[name] != was.get(name)]
            since += [f'"{name}":null' for name in was.keys() - now.keys()]
            parts.append(f"{{{','.join(since)}}}")
        return self.text + f', "since": [{",".join(parts)}]'.encode()

    @staticmethod
    def _steered(frame: FrameVariables) -> dict[str, str]:
        """What training depends on, as text by name."""
        kept = frame.kept
        return {name: kept[name].text for name in frame.role.steering if name in kept}

    def _find_moving(self, place: int, frame: FrameVariables) -> None:
        """Find what training depends on and this step has changed, and what behind backward."""
        was, now = self._committed.get(place, {}), self._steered(frame)
        then = now if self._at_backward is None else self._at_backward[place]
        if now == was == then:
            return
        self._committed[place] = now
        moved = {(frame.name, name) for name in was if was[name] != now.get(name)}
        names = then.keys() | now.keys()
        late = {(frame.name, name) for name in names if then.get(name) != now.get(name)}
        if not (moved <= self._moving and late <= self._late):
            self._moving |= moved
            self._late |= late
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

    def late_values(self) -> dict[str, str]:
        """What changes between a backward and its commit, as texts to be compared.

        Of what is only printed the log will tell if it is not known.
        """
        texts = {}
        for each in self._frames:
            for name, named in self._found_in(each.frame).items():
                kept = each.kept.get(name)
                if kept is None or name not in each.role.steering:
                    continue
                steers = name not in each.role.results
                if (each.name, name) in self._late:
                    text = f"{zlib.crc32(kept.text.encode()):08x}"
                    names = [name] if steers else [name, *named.into]
                    listed = " -> ".join(f"`{one}`" for one in names)
                    texts[f"{LATE if steers else RESULT}{named.place} {listed}"] = text
        return texts

    def is_kept(self, name: str) -> bool:
        """Whether the newest commit has the value of a variable of this name."""
        return any(name in each.kept for each in self._frames)

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
            frame: waits for the loop's first batch.
            loop: one that was over, or ``EPOCH_BEGIN``; ``None``: it is the one that continues.

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
        if isinstance(value, DistributedDataParallel):  # which the script makes anew
            is_left |= self._script.is_registered(value.module)
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
        """What training depends on, by frame, and what is known of it."""
        fields: dict[str, list[list[str]]] = {
            each: [] for each in ("steering", "moving", "late", "results")
        }
        for each in self._frames:
            names = sorted(each.role.steering)
            fields["steering"].append(names)
            fields["moving"].append([name for name in names if (each.name, name) in self._moving])
            fields["late"].append([name for name in names if (each.name, name) in self._late])
            fields["results"].append([name for name in names if name in each.role.results])
        self._steering_text = json.dumps(fields)[1:-1]


def _note_nothing(named: Named, value: Any) -> None:
    """What the loop over batches cannot keep either is noted there."""


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
