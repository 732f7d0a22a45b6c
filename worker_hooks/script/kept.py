"""What is saved of the script's own values: all of ``state.own``, and elsewhere what changes."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, compress
from operator import attrgetter, ne
from types import CellType, FrameType
from typing import Any
from weakref import WeakSet

import torch

from worker_hooks.contract.fingerprint import LATE
from worker_hooks.contract.script_record import BUFFERS, OWN, REGISTERED, SCRIPT, ScriptRecord
from worker_hooks.distributed.module_flags import Flags
from worker_hooks.script import source, values
from worker_hooks.script.attributes import AttributeFinder
from worker_hooks.script.containers import CONTAINERS, Container, holds_objects
from worker_hooks.script.notice import (
    DATA_CHANGES,
    DISTRIBUTED,
    GROWS,
    HARMLESS,
    ITERATES,
    LACKS_CHANGE,
    TOO_LARGE,
    WORKERS_RETURN,
)
from worker_hooks.script.own import (
    BufferPlace,
    ObjectStates,
    OwnValues,
    RegisteredObjects,
    ResizedBuffers,
)
from worker_hooks.script.source import SourceFindings
from worker_hooks.script.values import LargeValueError, Script
from worker_hooks.script.watch import (
    CONTENTS,
    Cells,
    DataObject,
    Group,
    Variable,
    as_object,
    data_objects,
    drop_values,
    groups_of,
    with_own_names,
)

log = logging.getLogger("msrun")

REBOUND = 50
"""So often the objects are followed that a variable gets; one that gets more holds no state."""

_VALUE = attrgetter("value")
SHARED = "state.shared."


class ScriptValues:
    """The values of one rank. They are looked at when backward begins and at each commit."""

    def __init__(
        self,
        registered: Callable[[], Iterable[tuple[str, object]]] = tuple,
        objects: ObjectStates | None = None,
        buffer_of: Callable[[str], BufferPlace | None] = lambda _: None,
    ) -> None:
        """Before :meth:`find` only ``state.own`` and ``state.shared`` are known.

        Args:
            registered: returns registered modules and optimizers with names, for what they keep
                beside what is registered.
            objects: registered objects that may differ between ranks.
            buffer_of: finds the place of a registered module's buffer by its name.
        """
        self._objects = RegisteredObjects(objects)
        self.resized = ResizedBuffers(buffer_of)
        self.own, self.shared = OwnValues(OWN[:-1]), OwnValues(SHARED[:-1])
        self.ignored: set[str] = set()  # names that are left alone
        self.content = values.join({}, {})  # what to write to the page
        self._kept_workers: WeakSet[object] = WeakSet()  # loaders that keep theirs
        self._read_last = 0  # the id of the loader
        self._returned = False  # to a loader that keeps its workers, and that is to be said
        self._from_peer: set[str] = set()  # values that are restored from another rank's
        self.late: set[str] = set()  # what has changed between a step's backward and its commit
        self._registered: list[object] = []  # alive, so that their ids stay theirs
        self.excluded: set[int] = set()
        self._groups = [Group(OWN, vars(self.own)), Group(SHARED, vars(self.shared))]
        self._versioned: list[Group] = []  # those whose dict has a version,
        self._versions: list[ctypes.c_uint64] = []  # where that is,
        self._cells: list[CellType] = []  # the cells of all closures,
        # and what these versions were, with the ids of what the cells held; ``None``: not known
        self._seen: list[int] | None = None
        self._others: list[Group] = []  # must be looked at each time
        self.is_found = False
        self.findings = SourceFindings()  # in the script's source
        self.held: frozenset[str] = frozenset()
        """The full names of what is saved here, and of the objects that it is in."""
        self._is_under_way = False  # a look was taken since the commit
        self._is_settled = False  # and the step is complete but for its commit
        self._is_stale = False  # the content says what does not hold any more
        self._changed: set[str] = set()  # at that look
        self.count = 0
        """How many values are saved here."""
        self._recent: list[Variable] = []  # changed since the newest commit
        self._data: list[DataObject] = []
        self._entry: Callable[..., Any] | FrameType | None = None
        self._rebound: Counter[str] = Counter()  # how often a variable got another object
        self._has_new_objects = False
        self.large: set[str] = set()  # what changes and cannot be saved
        self.newly_large: list[str] = []  # those that have just become so
        self._finder = AttributeFinder(registered)
        self._containers: dict[str, Container] = {}  # of objects, by name
        self._own_modules: Collection[str] = ()  # names of the script's modules
        self._has_begun = False
        self._advancing: list[str] = []  # iterators, which are to be named
        self._grown: list[str] = []  # those of another length, which are to be named

    def exclude(self, objects: Iterable[object]) -> None:
        """Leave alone what is saved otherwise: these objects, and those in containers of them."""
        waiting = list(objects)
        while waiting:
            each = waiting.pop()
            self._registered.append(each)
            self.excluded.add(id(each))
            if isinstance(each, dict):
                waiting += each.values()
            elif isinstance(each, list | tuple):
                waiting += each
            elif isinstance(each, torch.nn.Module):
                waiting += [*each.parameters(), *each.buffers()]

    @property
    def groups(self) -> Collection[Group]:
        """Where the script keeps values, as far as they are followed."""
        return self._groups

    def plain_of_modules(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """What registered modules and their tensors hold: names, where it is, and its key there."""
        return self._finder.plain()

    def is_registered(self, thing: object) -> bool:
        """Whether this object is saved otherwise."""
        return id(thing) in self.excluded or any(
            each.thing is thing and each.is_small for each in self._containers.values()
        )

    def find(self, entry: Callable[..., Any] | FrameType | None) -> None:
        """Find the script's variables; from now on those that change are kept.

        ``entry``: the training function, or the frame in which the script trains.
        """
        self.is_found, self._entry = True, entry
        self.findings = source.look_at(entry)
        try:
            found, self._containers = self._found()
            for group in found:
                for variable in group.scan(self._is_skipped):
                    variable.begin(self.excluded)
        except Exception as error:  # noqa: BLE001  modules and objects of any kind
            log.warning("the script's own variables are not saved: %r", error)
            return
        self._groups += found
        self._forget_seen()

    def _found(self) -> tuple[list[Group], dict[str, Container]]:
        """Where the script keeps values at present, and its containers of objects."""
        walk = self._finder.walk()
        groups = groups_of(self._entry, self.excluded, walk.things, walk.meet, walk.hooks)
        self._own_modules = walk.modules
        new = {name for name in walk.iterators if not self._is_skipped(name)} - self.large
        self.large |= new
        self._advancing += sorted(new)
        every = with_own_names([*groups, *walk.groups])
        return every, {each.name: each for each in walk.containers}

    def read_from(self, loader: object) -> None:
        """A loop over this loader begins."""
        self._data = data_objects(loader)
        if isinstance(loader, torch.utils.data.DataLoader) and loader.persistent_workers:
            if loader in self._kept_workers and self._read_last != id(loader):
                name = "persistent_workers"
                self._returned = name not in self.large and not self._is_skipped(name)
                self.large.add(name)
            self._kept_workers.add(loader)
        self._read_last = id(loader)

    def changes_of_data(self, *, is_first: bool) -> list[str]:
        """Sentences on what changes and begins anew: samplers and data sets, growing containers.

        ``is_first``: this is the first step of a loop.
        """
        grown = [GROWS.format(name) for name in self._grown]
        grown += [ITERATES.format(name) for name in self._advancing]
        grown += [WORKERS_RETURN] * self._returned
        self._returned = False
        self._grown.clear()
        self._advancing.clear()
        if not self._data:
            return grown
        new: set[str] = set()
        for each in self._data:
            new.update(each.changed(is_first=is_first))
        if not new:
            return grown
        new = {name for name in new - self.large if not self._is_skipped(name)}
        self.large |= new
        return grown + [DATA_CHANGES.format(name) for name in sorted(new)]

    def owners(self) -> dict[str, object]:
        """Objects whose attributes are the script's, random number generators among them."""
        return {f"{SCRIPT}.{group.prefix}": as_object(group) for group in self._groups}

    def begin(self) -> None:
        """The first loop begins: what was assigned since :meth:`find` is assigned so every time.

        Such a variable is saved only if it changes again. It may depend on the count of ranks.

        Raises:
            TypeError: as :meth:`look`.
        """
        self._objects.leave_out(self.is_ignored)
        for variable in self._find_changed(self._versions_now()):
            is_kept = variable.packed is not None or variable.name.startswith(_ALWAYS)
            is_kept |= isinstance(variable.holder, Flags)  # perhaps by the first epoch only
            self._take(variable)
            variable.was = variable.checksum
            if not is_kept:
                variable.packed = None
        self._has_begun = True
        self._join()

    def look(self, *, is_commit: bool) -> None:
        """Take up what has changed.

        Raises:
            TypeError: ``state.own`` or ``state.shared`` has what cannot be saved.
        """
        now = self._versions_now()
        always = self._others or self._containers or self._objects.variables
        is_same = now == self._seen is not None and not always
        changed = [] if is_same else self._find_changed(now)
        # as in most steps
        if not (changed or self._recent or self._is_stale or self._is_settled):
            self._is_under_way, self._changed = not is_commit, set()
            return
        for variable in changed:
            self._take(variable)
        self._recent += changed
        names = {each.name for each in changed}
        if is_commit and self._is_under_way:
            # nobody asks for what begins anew in any case
            self.late |= names - self.large - self._objects.left_out
        if not is_commit and self._is_settled:
            self._is_settled, self._is_stale = False, True
        self._is_under_way, self._changed = not is_commit, names
        if changed or self._is_stale:
            self._join()
        if is_commit:
            for variable in self._recent:
                variable.was = variable.checksum
            self._is_stale = bool(self._recent)
            self._recent = []

    def rewind(self) -> None:
        """Undo all changes, as in a new process; what was saved is restored afterwards."""
        self._from_peer.clear()
        for group in self._groups:
            for variable in list(group.variables.values()):
                if variable.checksum:
                    variable.rewind()
                    self._look(variable)
        self._forget_seen()
        self._recent, self._is_under_way, self._is_stale = [], False, True

    def settle(self) -> bool:
        """The main thread is blocked behind the step's update: take up what has changed until then.

        Returns:
            Whether that is all: no value has yet to change that usually does before the commit.
        """
        if self._objects.is_changing(getattr(self._entry, "__code__", self._entry)):
            return False
        if self.late and self._is_under_way:
            seen = self._changed
            self.look(is_commit=False)
            self._changed |= seen
            if not self.late <= self._changed:
                return False
            self._is_settled = True
            self._join()
        return True

    def _find_changed(self, now: list[int] | None) -> list[Variable]:
        for container in self._containers.values():
            self._look_into(container)
        seen = self._seen
        if now is None or seen is None:
            changed = self._look_at_all()
        elif now == seen:
            changed = self._look_at(self._others) if self._others else []
        else:
            moved = list(compress(self._versioned, map(ne, now, seen)))
            moved += [each for each in self._groups if each.version is None]
            moved = [each for each in moved if each not in self._others]
            changed = self._look_at([*self._others, *moved])
            self._note_seen(now)
        if self._has_new_objects:
            changed += self._follow_objects()
        return changed + self._objects.changed() if self._objects.variables else changed

    def _versions_now(self) -> list[int] | None:
        """What differs after a change; ``None``: a cell has no value, so that is not known.

        One comparison for all groups: to look at each costs more, as its objects are in no cache.
        """
        try:  # the values of variables are held, so their ids are those of no other objects
            return [*map(_VALUE, self._versions), *map(id, map(CONTENTS, self._cells))]
        except ValueError:
            return None

    def _look_at_all(self) -> list[Variable]:
        self._versioned = [each for each in self._groups if each.version is not None]
        self._versions = [each.version for each in self._versioned if each.version is not None]
        holders = [each.holder for each in self._groups]
        self._cells = [cell for each in holders if isinstance(each, Cells) for cell in each.cells()]
        now = self._versions_now()  # first: a thread may change more meanwhile
        changed = self._look_at(self._groups)
        self._note_seen(now)
        return changed

    def _note_seen(self, now: list[int] | None) -> None:
        self._seen = now
        self._others = [each for each in self._groups if each.changeable or not each.is_comparable]

    def _look_at(self, groups: Iterable[Group]) -> list[Variable]:
        changed = []
        for group in groups:
            if len(group.holder) != group.size:
                group.scan(self._is_skipped)
            changed += group.find_changed(self._look)
        return changed

    def _forget_seen(self) -> None:
        """Look at everything next time: values were assigned, or there are other objects."""
        self._seen = None
        for group in self._groups:
            group.forget()

    def _follow_objects(self) -> list[Variable]:
        """Look at the objects that variables hold now instead of those that they held.

        Returns:
            The attributes that have changed by that.
        """
        self._has_new_objects = False
        try:
            groups, containers = self._found()
        except Exception as error:  # noqa: BLE001  modules and objects of any kind
            log.warning("the script's new objects are not saved: %r", error)
            return []
        for name, container in containers.items():
            if self._containers.get(name, container).places != container.places:
                self._note_grown(name)
            self._containers[name] = container
        grown = tuple(f"{name}[" for name in self.large)
        found = {one.prefix: one for one in groups if not one.prefix.startswith(grown)}
        for group in self._groups:
            fresh = found.pop(group.prefix, group)
            if fresh.holder is not group.holder and not isinstance(fresh.holder, Cells):
                group.move_to(fresh.holder)
        self._groups += found.values()
        changed = self._look_at_all()
        self._has_new_objects = False
        return changed

    def _look_into(self, container: Container) -> None:
        if container.has_other_places():
            self._has_new_objects = not self._has_begun
            self._note_grown(container.name)
        elif container.has_other_items():
            self._rebound[container.name] += 1
            self._has_new_objects = self._rebound[container.name] <= REBOUND
            if not self._has_new_objects:
                self._note_grown(container.name)

    def _note_grown(self, name: str) -> None:
        """In a new process the container would have other objects than the saved ones.

        What is done to it before the first loop is done there, too.
        """
        if self._has_begun and name not in self.large and not self._is_skipped(name):
            self.large.add(name)
            self._grown.append(name)

    def _join(self) -> None:
        kept, was = {}, {}
        every = [*(group.variables for group in self._groups), self._objects.variables]
        for variable in chain.from_iterable(each.values() for each in every):
            if variable.packed is not None:
                kept[variable.name] = variable.packed
                if variable.was:
                    was[variable.name] = variable.was
        count = len(kept) - len(self._objects.kept)
        if count != self.count or not self.held.issuperset(kept):
            self.held, self.count = _with_owners(kept), count
        self.content = values.join(
            kept, was, self.late, printed=self._printed(), is_settled=self._is_settled
        )
        self._is_stale = False

    def late_values(self) -> dict[str, str]:
        """What of it changes between a backward and its commit, as texts to be compared."""
        places = {each.name: each.place for each in self.findings.carried if each.function == 0}
        found = {}
        for name in sorted(self.late - self._printed()):
            variable = self._variable(name)
            if variable is not None:
                place = f"{places[name]} " if name in places else ""
                shown = ResizedBuffers.name_of(name) if name.startswith(BUFFERS) else name
                found[f"{LATE}{place}`{shown}`"] = f"{variable.checksum or 0:08x}"
        return found

    def _printed(self) -> set[str]:
        """What changes behind a backward, and flows into nothing but output."""
        if not self.late:
            return self.late
        named = [each for each in self.findings.carried if each.function == 0]
        only = {e.name for e in named} - {e.name for e in named if not e.is_only_printed}
        return self.late & only  # of the script itself, whose names have no prefix

    def restore(
        self,
        script: Script,
        peer: Script | None = None,
        *,
        is_own: bool = True,
        is_last: bool = True,
        has_objects: bool = True,
    ) -> None:
        """Put values back; what is unknown here is left out.

        Args:
            script: the rank's own values, of the commit or of the begin of the last backward.
            peer: in the latter case those that another rank had committed. A value that changes
                later in a step is taken from it, if both had the same at the commit before.
            is_own: the values are this rank's; else those of ``state.own`` are another's.
            is_last: training begins; else they will be restored once more.
            has_objects: registered objects are restored, too.
        """
        self._finder.is_in_loop = is_last
        if self.is_found:
            self._follow_objects()  # some may have been made since training began
        found = {
            name: (script, each)
            for name, each in script.record.values.items()
            if is_own or not name.startswith(OWN)
            if has_objects or not name.startswith(REGISTERED)
        }
        for name in script.record.late | peer.record.late if peer is not None else ():
            assert peer is not None
            if not has_objects and name.startswith(REGISTERED):
                continue
            had, theirs = self._had(name, script.record), peer.record
            is_same = name in self._from_peer or had == theirs.was.get(name)
            if is_same and name in theirs.values:
                self._from_peer.add(name)
                found[name] = (peer, theirs.values[name])
            elif is_last:
                log.warning(LACKS_CHANGE, name)
        late = script.record.late | (peer.record.late if peer is not None else set())
        for name, (saved, text) in found.items():
            if self._put(name, text, saved) and name in late:
                self.late.add(name)  # peers ask for its value in steps in which it does not change

    def _had(self, name: str, record: ScriptRecord) -> int | None:
        """The checksum that the rank had at the commit before; unsaved values are as they began."""
        if name in record.was:
            return record.was[name]
        place = None if name.startswith(REGISTERED) else self._variable(name)
        if place is None or place.holder.get(place.key, place) is place:
            return None
        with contextlib.suppress(TypeError, LargeValueError):
            return values.pack(place.holder.get(place.key, None), name).checksum
        return None

    def _put(self, name: str, text: Any, saved: Script) -> bool:
        """Whether there is such a variable."""
        place = self._variable(name)
        if place is None:
            return False
        try:
            if name.startswith(REGISTERED):
                self._objects.put(place, text, saved.tensors)
                self._is_stale = True
                return True
            now = place.holder.get(place.key, None)
            place.holder[place.key] = values.unpack(text, saved.tensors, now)
        except ValueError as error:
            log.warning("%s is not restored: %s", name, error)
        self._look(place)
        self._forget_seen()
        self._take(place)
        place.was = place.checksum
        self._is_stale = True
        return True

    def keeps(self, name: str) -> bool:
        """Whether each rank's own state of this registered object is saved, or is not to be."""
        full = f"{REGISTERED}{name}"
        return full in self._objects.kept or self.is_ignored(full)

    def keep_buffers(self, names: Collection[str]) -> None:
        """Keep these buffers of registered modules: their place on the page has another size."""
        self.resized.choose(names)
        if self.resized not in self._groups:
            self._groups.append(self.resized)
        self._forget_seen()
        self._is_stale = True

    def _variable(self, name: str) -> Variable | None:
        if name.startswith(REGISTERED):
            return self._objects.variables.get(name)
        if name.startswith(BUFFERS):
            self.keep_buffers([*self.resized.names, self.resized.name_of(name)])
        for group in self._groups:
            key = name.removeprefix(group.prefix)
            if not name.startswith(group.prefix) or "." in key or self._is_skipped(name):
                continue
            if key not in group.variables:
                if not isinstance(group.holder, dict) and key not in group.holder:
                    continue
                group.variables[key] = Variable(name, group.holder, key)
            return group.variables[key]
        return None

    def is_ignored(self, name: str) -> bool:
        """Whether the script has said that training does not depend on it."""
        return name in self.ignored or not self.ignored.isdisjoint(name.split(".")[1:])

    def _is_skipped(self, name: str) -> bool:
        return self.is_ignored(name) or name in self.findings.temporary

    def _look(self, variable: Variable) -> bool:
        was_container = variable.mark is not None and type(variable.value) in CONTAINERS
        try:
            return variable.look(self.excluded)
        except Exception as error:
            if variable.name.startswith((OWN, SHARED)) and not values.is_generator(variable.value):
                raise TypeError(f"{variable.name} cannot be saved: {error}") from error
            self._is_stale |= variable.packed is not None
            variable.packed = None
            has_objects = holds_objects(variable.value, self._own_modules)
            is_other = has_objects or variable.is_outgrown  # it had none, and nothing of a library
            if is_other and was_container and self._has_begun:
                self._note_grown(variable.name)
                return False
            is_module = isinstance(variable.value, torch.nn.Module)
            is_followed = has_objects or is_module or values.is_plain_object(variable.value)
            if is_followed and self._rebound[variable.name] < REBOUND:
                self._rebound[variable.name] += 1
                self._has_new_objects = self.is_found
            elif is_followed and not is_module:  # to follow it at each step takes long
                self._note_grown(variable.name)
                self._is_stale |= drop_values(self._groups, f"{variable.name}.")
            return False

    def _take(self, variable: Variable) -> None:
        """Keep a value that has changed."""
        if variable.name in self._objects.variables:  # it is packed, if it could be
            self.late -= self._objects.left_out
            return
        variable.packed = None
        with contextlib.suppress(TypeError, LargeValueError):
            variable.pack()
        if variable.is_large and variable.name not in self.large:
            self.large.add(variable.name)
            self.newly_large.append(variable.name)
            name, sizes = variable.name, (values.LARGE_BYTES >> 10, values.LARGE_TENSORS)
            text, more = (DISTRIBUTED, ()) if variable.is_distributed else (TOO_LARGE, sizes)
            log.warning(text, name, *more, HARMLESS.format(name))


_ALWAYS = OWN, SHARED, REGISTERED


def _with_owners(names: Iterable[str]) -> frozenset[str]:
    """``main.meter.total``, ``main.meter`` and ``main``."""
    parts = [name.split(".") for name in names]
    return frozenset(".".join(each[:count]) for each in parts for count in range(1, len(each) + 1))
