"""What a script sets on its data set and samplers between loops: a curriculum, mosaic turned off.

Nothing of it is in the place in the data, and a new process runs no epoch that is over. So the
plain attributes that differ from those of the first loop are saved as they were when the loop
began, and set again before it is opened. What changes as data are read is no such attribute, and
is named (:class:`worker_hooks.script.watch.DataObject`).
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from worker_hooks.data.loader_kind import loaders_of, parts_of
from worker_hooks.data.loader_workers import dataset_owners
from worker_hooks.script.values import FIXED, is_array, unpack
from worker_hooks.script.watch import is_local
from worker_hooks.tensors import state_json

_MOST_TEXT = 1 << 10  # of a value
_MOST = 32 << 10  # of all of them
_READ_BYTES = 1 << 20  # of an array
LARGE = (
    "`{}` is set between loops and is too large to be saved with the place in the data, or of "
    "another kind: it begins anew after a replacement or resume; set it at the top of each epoch"
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
        self._told: list[str] = []

    def unsaved(self) -> list[str]:
        """Sentences on what cannot be saved, each once."""
        told, self._told = self._told, []
        return told

    def begin(self, *, is_fresh: bool) -> None:
        """A loop begins; ``is_fresh``: so do its workers, if it has any."""
        found, room = dict[str, Any](), _MOST
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
                elif place not in self._large:
                    self._large.add(place)
                    self._told.append(LARGE.format(f"{type(part).__name__}.{key}"))
        self.changed = found

    def restore(self, saved: Mapping[str, Any], *, for_workers: bool) -> None:
        """Set what was saved in :attr:`changed`.

        Args:
            saved: what that was.
            for_workers: as it was when the workers began, which stay, and have copies of it.
        """
        for name, part, _ in self.known():
            for place, (now, born) in saved.items():
                owner, _, key = place.rpartition(".")
                text = born if for_workers else now
                if owner == name and isinstance(text, str):
                    with suppress(ValueError):  # it names a tensor: what is there stays
                        # in place, as other names may refer to it
                        vars(part)[key] = unpack(json.loads(text), {}, vars(part).get(key))
        self.changed = dict(saved)

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
        elif is_array(value) and value.nbytes <= _READ_BYTES:
            found[key] = zlib.crc32(value.tobytes())
        elif type(value) in {str, bytes} and len(value) > _MOST_TEXT:
            found[key] = hash(value)
        elif type(value) in FIXED or (type(value) in {list, tuple} and _is_small(value)):
            try:
                encoded, tensors = state_json.encode(value, key)
            except TypeError:
                continue
            text = state_json.dumps(encoded)
            is_whole = len(text) <= _MOST_TEXT and not tensors  # a text only names tensors
            inside = map(id, value if type(value) in {list, tuple} else ())
            found[key] = text if is_whole else hash((text, *inside))
    return found


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
