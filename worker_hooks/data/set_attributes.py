"""What a script sets on its data set and samplers between loops: a curriculum, mosaic turned off.

Nothing of it is in the place in the data, and a new process runs no epoch that is over. So the
plain attributes that differ from those of the first loop are saved as they were when the loop
began, and set again before it is opened. What changes as data are read is no such attribute, and
is named (:class:`worker_hooks.script.watch.DataObject`); of what steps do to a list or a dict that
is known here, at the second, fourth, eighth step and so on of a loop.
"""

from __future__ import annotations

import json
import marshal
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import PurePath
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from worker_hooks.data.loader_kind import loaders_of, parts_of
from worker_hooks.data.loader_workers import dataset_owners
from worker_hooks.script.growing import MAPPINGS, PLAIN
from worker_hooks.script.values import FIXED, is_array, unpack
from worker_hooks.script.watch import is_local
from worker_hooks.tensors import state_json

_MOST_TEXT = 1 << 10  # of a value
_MOST = 32 << 10  # of all of them
_READ_BYTES = 1 << 20  # of an array; of a larger one in pieces
_PIECES, _PIECE = 16, 1 << 10  # of a larger one: their count, and the items of each
_MOST_ITEMS = 1 << 17  # of a container that are looked at: of a longer list each second, third ...
_NUMBERS = frozenset({bool, int, float, complex, type(None)})
_LISTS = frozenset({list, tuple, deque})
_DICTS = MAPPINGS
_SETS = frozenset({set, frozenset})
_SHARE, _CHEAP_S = 0.01, 0.001  # of the time, for looks within loops that take longer than this
_CONTAINERS = _LISTS | _DICTS | _SETS
LARGE = (
    "`{0}` is set between loops and is too large to be saved with the place in the data, or of "
    "another kind: it begins anew after a replacement or resume; set it at the top of each epoch, "
    "and say state.ignore('{0}')"
)
CHANGES = (
    "`{0}` changes while a loop reads it, and these changes are lost after a replacement or "
    "resume: change it between loops; if no batch depends on it, say state.ignore('{0}')"
)

_first: Any = WeakIdKeyDictionary()  # some data sets, as dataclasses, have no hash


def note_first(owners: Mapping[str, object]) -> None:
    """Training is about to begin: see what the data of the loaders that a script holds are now.

    Args:
        owners: what has the script's variables as attributes, by a prefix.
    """
    for loader in loaders_of(owners):
        parts = parts_of(loader)
        attributes = SetAttributes(parts | dataset_owners(parts.get("dataset")))
        deque(attributes.known(), maxlen=0)


class SetAttributes:
    """Looks at the attributes of the objects that one loader reads."""

    def __init__(self, parts: Mapping[str, object]) -> None:
        """``parts``: the loader, its data set and its samplers, by name."""
        found = {id(each): (name, each) for name, each in reversed(list(parts.items()))}
        self._parts = dict(pair for pair in found.values() if _is_looked_at(pair[1]))
        self.changed: dict[str, Any] = {}
        """As JSON, by part and attribute, of what differs from the begin of training: as this loop
        begins, and as the present workers began."""
        self._born: dict[str, str | int] = {}  # the latter, of all
        self._large: set[str] = set()
        self._told: list[tuple[str, str]] = []  # names with what to say of them
        self._steps = 0  # of the present loop
        self._in_first: dict[str, str | int] = {}  # what was there behind the first of them
        self._looked_at, self._cost_s = 0.0, 0.0  # within a loop, newest

    def unsaved(self, is_ignored: Callable[[str], bool] = lambda _: False) -> list[str]:
        """A step is complete: sentences on what cannot be saved, each once.

        ``is_ignored``: tells for a name whether the script has said that it does not matter.
        """
        self._steps += 1
        if not self._steps & (self._steps - 1):
            self._look_within()
        told, self._told = self._told, []
        return [text.format(name) for name, text in told if not is_ignored(name)]

    def _look_within(self) -> None:
        """Name what steps change: it would come back as it was when the loop began."""
        began, is_costly = time.monotonic(), self._cost_s > _CHEAP_S
        if is_costly and began - self._looked_at < self._cost_s / _SHARE:
            return
        cpu_s, now = time.thread_time(), dict[str, str | int]()
        for name, part, _ in self.known():
            kinds = {key: type(value) for key, value in vars(part).items()}
            for key, value in _plain_of(part).items():
                if kinds.get(key) in _CONTAINERS:
                    place = f"{name}.{key}"
                    now[place] = value
                    if self._in_first.get(place, value) != value:
                        self._tell(place, part, CHANGES)
        if self._steps == 1:
            self._in_first = now
        self._looked_at, self._cost_s = time.monotonic(), time.thread_time() - cpu_s

    def _tell(self, place: str, part: object, text: str) -> None:
        if place not in self._large:
            self._large.add(place)
            self._told.append((f"{type(part).__name__}.{place.rpartition('.')[2]}", text))

    def begin(self, *, is_fresh: bool) -> None:
        """A loop begins; ``is_fresh``: so do its workers, if it has any."""
        found, room = dict[str, Any](), _MOST
        self._steps, self._in_first = 0, {}
        for name, part, first in self.known():
            for key, value in _plain_of(part).items():
                place = f"{name}.{key}"
                born = self._born[place] = value if is_fresh else self._born.get(place, value)
                if value == born == first.get(key) and place not in self.changed:
                    continue
                text = value if isinstance(value, str) else ""
                room -= len(text)
                if text and room > 0:
                    found[place] = text, born
                else:
                    self._tell(place, part, LARGE)
        self.changed = found

    def restore(self, saved: Mapping[str, Any], *, for_workers: bool = False) -> None:
        """Set what was saved in :attr:`changed`, before the loop is opened.

        Args:
            saved: what that was.
            for_workers: what the data set has as it was when the workers began, which stay, and
                have copies of it. :meth:`restore_here` sets the rest once they have begun.
        """
        self._restore(saved, lambda is_data, now, born: born if is_data and for_workers else now)
        self._restore(self._as_at_first(saved), lambda _, now, __: now)
        self.changed = dict(saved)

    def _as_at_first(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What the loop began with as training had, and a survivor has changed in it since."""
        found = dict[str, Any]()
        for name, part, first in self.known():
            now = _plain_of(part)
            for key, text in first.items():
                if f"{name}.{key}" not in saved and now.get(key) != text:
                    found[f"{name}.{key}"] = text, text
        return found

    def restore_here(self, saved: Mapping[str, Any]) -> None:
        """The workers that stay have begun: set the data set's attributes of this process.

        Those of samplers are left alone. They may have changed as the loop was opened.
        """
        self._restore(saved, lambda is_data, now, _: now if is_data else None)
        self.changed = dict(saved)

    def _restore(self, saved: Mapping[str, Any], chosen: Callable[[bool, Any, Any], Any]) -> None:
        for name, part, _ in self.known():
            is_data = name.startswith("dataset")
            for place, (now, born) in saved.items():
                owner, _, key = place.rpartition(".")
                text = chosen(is_data, now, born)
                if owner == name and isinstance(text, str):
                    with suppress(ValueError):  # it names a tensor: what is there stays
                        # in place, as other names may refer to it
                        vars(part)[key] = unpack(json.loads(text), {}, vars(part).get(key))

    def known(self) -> Iterator[tuple[str, Any, dict[str, str | int]]]:
        """The parts with their names, and what they had when the first loop began."""
        for name, part in self._parts.items():
            try:
                first = _first.get(part)
                if first is None:
                    first = _first[part] = _plain_of(part)
            except TypeError:  # it cannot be referred to weakly
                continue
            yield name, part, first


def _is_looked_at(part: object) -> bool:
    """Whether it is the script's or torch's, and does not say itself what is to be saved."""
    module = type(part).__module__
    is_known = module.startswith("torch.utils.data") or is_local(module)
    has_state = isinstance(part, DataLoader) or hasattr(part, "state_dict")
    return is_known and hasattr(part, "__dict__") and not has_state


def _plain_of(part: Any) -> dict[str, str | int]:
    """The attributes as texts; numbers stand for those that are too large, and tell of a change."""
    found: dict[str, str | int] = {}
    for key, value in list(vars(part).items()):
        if isinstance(value, Tensor):
            version = 0 if value.is_inference() else value._version  # noqa: SLF001
            found[key] = hash((id(value), version))
        elif callable(value):  # a transform: which one it is
            found[key] = hash((id(value), type(value).__qualname__))
        elif is_array(value) and not value.dtype.hasobject:
            found[key] = _crc(value)
        elif type(value) in {str, bytes} and len(value) > _MOST_TEXT:
            found[key] = hash(value)
        elif type(value) in FIXED | _CONTAINERS:
            encoded = _encoded(value, key) if _is_text(value) and _is_small(value) else None
            content = _content(value) if encoded is None else encoded
            if content is not None:
                found[key] = content
    return found


def _is_text(value: Any) -> bool:
    """Whether it may be saved: of a dict or a set, which may be a cache, only if it is plain."""
    items = value.values() if type(value) in _DICTS else value if type(value) in _SETS else ()
    return FIXED.issuperset(map(type, items))


def _encoded(value: Any, key: str) -> str | int | None:
    """The value as text; a number: it is too long; ``None``: it cannot be text."""
    try:
        encoded, tensors = state_json.encode(value, key)
    except TypeError:
        return None
    text = state_json.dumps(encoded)
    is_whole = len(text) <= _MOST_TEXT and not tensors  # a text only names tensors
    inside = map(id, value if type(value) in {list, tuple} else ())
    return text if is_whole else hash((text, *inside))


def _crc(array: Any) -> int:
    """Of a large one, which may lie in a file, pieces are read."""
    if array.nbytes <= _READ_BYTES:
        return zlib.crc32(array.tobytes())
    found, last = 0, array.size - _PIECE
    for piece in range(_PIECES):
        at = last * piece // (_PIECES - 1)
        found = zlib.crc32(array.flat[at : at + _PIECE].tobytes(), found)
    return found


def _content(value: Any) -> int | None:
    """What differs if a container gets other plain values, or another order of pairs or lists.

    ``None``: it holds other things, as a cache of what was read does.
    """
    kind = type(value)
    if kind in FIXED:
        return None
    if kind in _DICTS:
        parts = _of_items(value), _of_items(value.values())
        return None if None in parts else hash((len(value), *parts))
    if kind in _SETS:
        is_plain = len(value) <= _MOST_ITEMS and FIXED.issuperset(map(type, value))
        return hash(frozenset(value)) if is_plain else None
    items = value
    if len(value) > _MOST_ITEMS and kind is not deque:
        items = value[:: -(-len(value) // _MOST_ITEMS)]
    found = _of_items(items)
    return None if found is None else hash((len(value), found))


def _of_items(items: Iterable[Any]) -> int | None:
    some = [*islice(items, _MOST_ITEMS)]
    kinds = {*map(type, some)}
    if kinds <= {str, bytes}:
        return hash(tuple(some))  # each has its own already
    if kinds <= _NUMBERS | {str, bytes}:
        return zlib.crc32(marshal.dumps(some, PLAIN))
    if kinds <= {list, tuple, str, bytes} or all(issubclass(each, PurePath) for each in kinds):
        return hash(tuple(map(id, some)))
    return None


def _is_small(value: Any) -> bool:
    """Whether it is made text in no time: whole data sets may lie in a list or a pair."""
    waiting, room = [value], _MOST_TEXT
    while waiting and room > 0:
        each = waiting.pop()
        if isinstance(each, dict | list | tuple | set | frozenset | deque):
            room -= len(each) + 1
            if room > 0:
                waiting += [*each.keys(), *each.values()] if isinstance(each, dict) else each
        elif isinstance(each, str | bytes | bytearray):
            room -= len(each) + 1
        elif is_array(each):
            room -= each.nbytes // 8 + 1
    return room > 0
