"""Modules' buffers, written to the status page at every commit: each rank has its own.

Most are tiny and change with every forward, as the statistics of batch norms do; they are copied
together. Large ones are mostly constant: a mask, or a table of positions. They are copied only if
they may have changed since the same record of the page was written before.

Those on an accelerator are copied by the device itself, and the main thread does not wait for it
(:mod:`worker_hooks.device.stamped_copies`).
"""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from worker_hooks.contract.status_page import DeviceArea, Entry, Page
from worker_hooks.device import devices
from worker_hooks.device.stamped_copies import Gathered, Single, StampedCopies, memory
from worker_hooks.state.module import ModulePiece, Place
from worker_hooks.state.registry import Piece
from worker_hooks.state.snapshot import version
from worker_hooks.tensors.tensor_bytes import entry_of, plain, to_bytes, why_not_plain

log = logging.getLogger("msrun")

UNSAVED = (
    "buffer %s %s: a death in a step in which it does ends the job, as it is not saved as of that "
    "step; make it a value in state.own, or say state.ignore(...) of it"
)
MOST_KEPT = 4 << 20
"""Bytes of a buffer that is kept as a value of the script while its size changes."""

_SMALL_BYTES = 4096  # up to this size a copy costs less than a comparison
_QUICK_BYTES = 32 << 10  # torch concatenates up to this size without its other threads
_TRIALS = 4  # comparisons of a buffer's bytes before torch's version counter is trusted

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class _Kept(NamedTuple):
    """A buffer and its offset in a record, or in an area that a device writes."""

    place: Place
    entry: Entry
    offset: int
    is_host: bool


class _Run(NamedTuple):
    """Adjacent buffers in a record that are always copied."""

    offset: int
    nbytes: int
    octets: list[Tensor]  # each buffer's own memory as bytes
    is_host: bool


class _Constant:
    """A large buffer that may be constant, and what is known of it."""

    def __init__(self, kept: _Kept, tensor: Tensor) -> None:
        self.kept = kept
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.written: dict[int, int] = {}  # by slot: the version that was written
        self.trials = 0
        self.is_counted = True  # its version counts all changes: nobody writes through .data

    def is_of(self, kept: _Kept, tensor: Tensor) -> bool:
        """Whether what is known is about this tensor at this place."""
        return self.kept == kept and self.tensor is tensor and self.address == tensor.data_ptr()

    def fill(self, address: int, slot: int) -> None:
        """Write it to a record, unless the record has it already."""
        now = version(self.tensor)
        is_same = self.is_counted and self.written.get(slot) == now
        if is_same and self.trials >= _TRIALS:
            return
        octets = to_bytes(self.tensor)
        source = ctypes.addressof(ctypes.c_ubyte.from_buffer(octets))
        target = address + self.kept.offset
        if is_same:
            self.trials += 1
            self.is_counted = _memcmp(target, source, len(octets)) == 0
            if self.is_counted:
                return
        ctypes.memmove(target, source, len(octets))
        self.written[slot] = now

    def differs(self, slots: tuple[int, int], addresses: tuple[int, int]) -> bool:
        """Whether two records that it was written to have other bytes."""
        one, other = map(self.written.get, slots)
        if self.is_counted and self.trials >= _TRIALS and one == other:
            return False
        one_at, other_at = (address + self.kept.offset for address in addresses)
        return bool(_memcmp(one_at, other_at, self.kept.entry.nbytes))


class _DeviceConstant:
    """The same on a device. The main thread looks at its bytes when the device has copied them."""

    def __init__(self, kept: _Kept, tensor: Tensor) -> None:
        self.kept = kept
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.written: dict[int, int] = {}  # by slot of an area: the version that was copied
        self.trials = 0
        self.is_counted = True

    def is_of(self, kept: _Kept, tensor: Tensor) -> bool:
        """Whether what is known is about this tensor at this place."""
        return self.kept == kept and self.tensor is tensor and self.address == tensor.data_ptr()

    def is_due(self, slot: int) -> bool:
        """Whether it is to be copied to an area now, which will have it then."""
        now, was = version(self.tensor), self.written.get(slot)
        self.written[slot] = now
        return not (self.is_counted and now == was and self.trials >= _TRIALS)

    def compare(
        self, slots: tuple[int, int], read: Callable[[int, int, int], bytes | None]
    ) -> None:
        """Find out whether its version counts all changes.

        Args:
            read: returns bytes of one of the areas, if they are there.
        """
        versions = {self.written.get(slot) for slot in slots}
        if self.trials >= _TRIALS or not self.is_counted or len(versions) > 1 or None in versions:
            return
        start = self.kept.offset
        old, new = (read(slot, start, start + self.kept.entry.nbytes) for slot in slots)
        if old is not None and new is not None:
            self.trials += 1
            self.is_counted = old == new


class Buffers:
    """The buffers of all registered modules, persistent or not."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = [piece for piece in pieces if isinstance(piece, ModulePiece)]
        self._known: list[tuple[dict[str, Tensor | None], str, Tensor, int]] | None = None
        self._absent: list[Place] = []
        self._runs: list[_Run] = []
        self._inside: list[list[tuple[str, int, int]]] = []  # names, offsets and bytes, by run
        self._constants: list[_Constant] = []
        self._gathered: list[Gathered] = []  # on a device
        self._device_constants: list[_DeviceConstant] = []
        self._is_one_device = True  # all of those are where they were when the page was made
        self._targets: dict[tuple[int, int], list[Tensor]] = {}
        self._said: set[str] = set()
        self._found: list[tuple[Place, ...]] = []  # by module, as it had them last
        self.unfinished: tuple[str, ...] = ()
        """How names begin of what the script has yet to change as it did before: until then another
        module may be in the place of the one whose buffer was saved, so nothing is put back."""
        self.unsaved: frozenset[str] = frozenset()
        """Buffers that the page has no place for, or one for another size or type."""
        self.odd: frozenset[str] = frozenset()
        """Those of them that have no plain bytes, as a sparse tensor has none."""

    @cached_property
    def _places(self) -> list[Place]:
        return [place for piece in self._pieces for place in piece.places()]

    @cached_property
    def _by_name(self) -> dict[str, Place]:
        return {place.name: place for place in self._places}

    @cached_property
    def _kept(self) -> list[_Kept]:
        """Fixed when first asked for; those that are copied together come first."""
        found = [
            (devices.is_on_host(tensor), _is_constant(place, tensor), place, tensor)
            for place in self._places
            if (tensor := place.tensor) is not None and place.name not in self.odd
        ]
        found.sort(key=lambda each: (not each[0], each[1]))
        kept, offsets = [], {True: 0, False: 0}
        for is_host, _, place, tensor in found:
            entry = entry_of(place.name, tensor)
            kept.append(_Kept(place, entry, offsets[is_host], is_host))
            offsets[is_host] += entry.nbytes
        return kept

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All of them, those in host memory first; fixed when first asked for.

        Raises:
            TypeError: a buffer has no plain bytes.
        """
        return tuple(kept.entry for kept in self._kept)

    @cached_property
    def host_entries(self) -> tuple[Entry, ...]:
        """What :meth:`fill` writes."""
        return tuple(kept.entry for kept in self._kept if kept.is_host)

    @cached_property
    def device_entries(self) -> tuple[Entry, ...]:
        """What :meth:`copy_device` writes."""
        return tuple(kept.entry for kept in self._kept if not kept.is_host)

    @cached_property
    def nbytes(self) -> int:
        """How many bytes :meth:`fill` writes."""
        return sum(entry.nbytes for entry in self.host_entries)

    @cached_property
    def device_nbytes(self) -> int:
        """How many bytes :meth:`copy_device` writes."""
        return sum(entry.nbytes for entry in self.device_entries)

    @cached_property
    def _devices(self) -> tuple[torch.device, ...]:
        """Of those that are not in host memory."""
        tensors = (kept.place.tensor for kept in self._kept if not kept.is_host)
        return devices.devices_of(each for each in tensors if each is not None)

    def renew(self) -> None:
        """Find all buffers anew: the modules are others, and another page will be made."""
        cached = "_places _by_name _kept _devices entries host_entries device_entries"
        for name in (*cached.split(), "nbytes", "device_nbytes"):
            vars(self).pop(name, None)
        self._targets.clear()
        self.forget()

    def forget(self) -> None:
        """Write all of it next time: there is a new page."""
        self._known = None
        self._constants, self._device_constants = [], []

    def look(self, *, is_commit: bool) -> bool:
        """Look for the present buffers; whether others than before are :attr:`unsaved`.

        To be called before :meth:`fill`, as what is written beside it tells of these.

        ``is_commit``: look for those that modules have added, too, which takes longer.
        """
        before = self.unsaved
        if is_commit:
            found = [piece.places() for piece in self._pieces]
            if len(found) != len(self._found) or not all(map(is_, found, self._found)):
                self._found = found
                vars(self).pop("_places", None)
                vars(self).pop("_by_name", None)
                self._known = None
        if not self._is_known():
            self._look_up()
        return self.unsaved != before

    def place_of(self, name: str) -> Place | None:
        """Where a buffer of this name is, or would be; ``None``: no module has such a place."""
        if name.startswith(self.unfinished):
            return None
        if (known := self._by_name.get(name)) is not None:
            return known
        found = (piece.place_of(name) for piece in self._pieces)
        return next((each for each in found if each is not None), None)

    def needed(self, names: Collection[str]) -> list[str]:
        """Those of these that a module's own ``state_dict`` has, so that training needs them."""
        places = {place.name: place for piece in self._pieces for place in piece.places()}
        return sorted(e for e in names if e not in places or not places[e].is_transient)

    def beside(self, meta: Mapping[str, Any]) -> bytes:
        """What is written of a place in the data, as JSON, with :attr:`unsaved`."""
        return with_unsaved(json.dumps(meta).encode(), self.unsaved)

    def larger_than(self, nbytes: int) -> frozenset[tuple[str, torch.Size]]:
        """Those of :attr:`unsaved` that are now, with their shapes."""
        names = self.unsaved - self.odd
        found = ((each.name, each.tensor) for each in self._places if each.name in names)
        return frozenset((n, e.shape) for n, e in found if e is not None and e.nbytes > nbytes)

    def newly_unsaved(self) -> list[str]:
        """Those that a step may end without, as they are large or no plain tensors; said once."""
        large = {name: "changes its size" for name, _ in self.larger_than(MOST_KEPT)}
        found = large | dict.fromkeys(self.odd, "is no plain tensor any more")
        new = found.keys() - self._said
        self._said |= new
        for name in sorted(new):
            log.warning(UNSAVED, name, found[name])
        return sorted(new)

    def unsaved_up_to(self, nbytes: int) -> list[str]:
        """Those of :attr:`unsaved` that are no larger than this, as their modules have them."""
        small = self.unsaved - self.odd - {name for name, _ in self.larger_than(nbytes)}
        names = [each.name for each in self._places if each.name in small]
        return names + sorted(small - {*names})

    def fill(self, address: int, slot: int) -> int:
        """Write the buffers in host memory to a record of the page; return the count of bytes.

        ``address``: of the first byte.
        """
        if not self.nbytes and self._known is not None:
            return 0
        if not self._is_known():
            self._look_up()
        key = slot, address
        targets = self._targets.get(key)
        if targets is None:
            targets = [memory(address + run.offset, run.nbytes) for run in self._runs]
            self._targets[key] = targets
        for run, target in zip(self._runs, targets, strict=True):
            if run.is_host:
                torch.cat(run.octets, out=target)
            else:
                # waits for the device: the bytes are needed now
                target.copy_(torch.cat(run.octets))
        for constant in self._constants:
            constant.fill(address, slot)
        return self.nbytes

    def differing(self, slots: tuple[int, int], addresses: tuple[int, int]) -> Iterator[str]:
        """Names of the buffers in host memory of which two records have other bytes.

        Args:
            slots: of two records that were filled one after the other.
            addresses: of the first byte of each.
        """
        one, other = addresses
        for run, inside in zip(self._runs, self._inside, strict=True):
            if _memcmp(one + run.offset, other + run.offset, run.nbytes):
                for name, at, nbytes in inside:
                    if _memcmp(one + at, other + at, nbytes):
                        yield name
        for constant in self._constants:
            if constant.differs(slots, addresses):
                yield constant.kept.entry.name

    def device_copies(self, page: Page, held: Sequence[torch.device]) -> StampedCopies | None:
        """What copies to a page; ``None``: no buffer is on a device.

        ``held``: the devices that hold replicated state.
        """
        if not self.device_nbytes:
            return None
        found = {*self._devices, *held}
        # gradients prove that their own device has passed a copy, and nothing of another device
        return StampedCopies(page, found.pop() if len(found) == len(held) == 1 else None)

    def copy_device(self, copies: StampedCopies, area: DeviceArea, step: int) -> None:
        """Let the device write its buffers to an area of the page, when it comes to that.

        ``step``: what to mark the bytes with.
        """
        if not self._is_known():
            self._look_up()
        copies.copy(
            area,
            step,
            self._gathered,
            lambda: [
                Single(each.kept.offset, each.kept.entry.nbytes, partial(_octets, each.tensor))
                for each in self._device_constants
                if each.is_due(area.slot)
            ],
            is_here=self._is_one_device,
        )

    def compare_device(
        self, slots: tuple[int, int], read: Callable[[int, int, int], bytes | None]
    ) -> None:
        """Look at what a device has written: see :meth:`_DeviceConstant.compare`."""
        for each in self._device_constants:
            each.compare(slots, read)

    def read_device(self) -> bytes:
        """What is on a device now; waits for it."""
        found = bytearray(self.device_nbytes)
        for kept in self._kept:
            if not kept.is_host and (tensor := _fitting(kept)) is not None:
                found[kept.offset : kept.offset + kept.entry.nbytes] = to_bytes(tensor)
        return bytes(found)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], *, are_all: bool = True) -> None:
        """Put buffers back, bit for bit; those that are not in ``tensors`` keep their values.

        ``are_all``: else only those of another size than they have now: DDP compares the sizes.
        """
        known = {each.name: each for piece in self._pieces for each in piece.places()}
        for name in (each for each in tensors if not each.startswith(self.unfinished)):
            place = known.get(name) or self.place_of(name)
            if place is not None and (are_all or not _has_shape_of(place.tensor, tensors[name])):
                _put(place, tensors[name])

    def _is_known(self) -> bool:
        """Whether every buffer is still the same tensor at the same address."""
        if self._known is None:
            return False
        for held, key, tensor, address in self._known:
            if held.get(key) is not tensor or (address >= 0 and tensor.data_ptr() != address):
                return False
        return all(place.tensor is None for place in self._absent)

    def _look_up(self) -> None:
        """Look up every buffer again."""
        self._known = [
            (place.owner._buffers, place.key, tensor, _address(tensor))  # noqa: SLF001
            for place in self._places
            if (tensor := place.tensor) is not None
        ]
        self.odd = frozenset(
            place.name
            for place in self._places
            if (tensor := place.tensor) is not None and why_not_plain(tensor)
        )
        self._absent = [place for place in self._places if place.tensor is None]
        self._targets.clear()
        fitting = [(kept, tensor) for kept in self._kept if (tensor := _fitting(kept)) is not None]
        self._note_unsaved({kept.entry.name for kept, _ in fitting})
        host = [pair for pair in fitting if pair[0].is_host]
        there = [pair for pair in fitting if not pair[0].is_host]
        self._constants = [
            next((each for each in self._constants if each.is_of(kept, tensor)), None)
            or _Constant(kept, tensor)
            for kept, tensor in host
            if _is_constant(kept.place, tensor)
        ]
        self._device_constants = [
            next((each for each in self._device_constants if each.is_of(kept, tensor)), None)
            or _DeviceConstant(kept, tensor)
            for kept, tensor in there
            if _is_constant(kept.place, tensor)
        ]
        self._runs = list(
            _runs([pair for pair in host if not _is_constant(pair[0].place, pair[1])])
        )
        ends = [(run.offset, run.offset + run.nbytes) for run in self._runs]
        self._inside = [
            [
                (kept.entry.name, kept.offset, kept.entry.nbytes)
                for kept in self._kept
                if kept.is_host and start <= kept.offset < end
            ]
            for start, end in ends
        ]
        always = [pair for pair in there if not _is_constant(pair[0].place, pair[1])]
        self._gathered = [
            Gathered(run.offset, run.nbytes, run.octets) for run in _runs(always, most=None)
        ]
        self._is_one_device = {each.device for _, each in there} <= {*self._devices}

    def _note_unsaved(self, fitting: set[str]) -> None:
        there = {place.name for place in self._places} - {place.name for place in self._absent}
        self.unsaved = frozenset(there | {entry.name for entry in self.entries}) - fitting


def with_unsaved(meta: bytes, names: Collection[str], *, is_present: bool = False) -> bytes:
    """What is written of a place in the data, with names of buffers that the record lacks.

    ``is_present``: it has these, and lacked them before.
    """
    if not names:
        return meta
    told = json.loads(meta)
    found = {*told.pop("unsaved", ())}
    found = found - {*names} if is_present else found | {*names}
    return json.dumps(told | ({"unsaved": sorted(found)} if found else {})).encode()


def _is_constant(place: Place, tensor: Tensor) -> bool:
    """Whether to check for changes before the buffer is copied.

    Not for a batch norm: torch does not count the changes of its statistics. Buffers that are not
    contiguous or no plain memory are treated as constant, too, because each is copied by itself.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return True
    return tensor.nbytes > _SMALL_BYTES and not isinstance(place.owner, _NormBase)


def _address(tensor: Tensor) -> int:
    """Where its elements are; -1: it has no plain bytes."""
    return -1 if why_not_plain(tensor) else tensor.data_ptr()


def _fitting(kept: _Kept) -> Tensor | None:
    """The buffer, if it still has the shape and type that it has on the page."""
    tensor = kept.place.tensor
    if tensor is None or why_not_plain(tensor):
        return None
    return tensor if entry_of(kept.entry.name, tensor) == kept.entry else None


def _runs(pairs: list[tuple[_Kept, Tensor]], most: int | None = _QUICK_BYTES) -> Iterator[_Run]:
    """Groups of buffers that are adjacent in the record and on one device, of so many bytes."""
    begin, end, number, numbered = 0, 0, 0, []
    for kept, tensor in pairs:
        after = kept.offset + kept.entry.nbytes
        if kept.offset != end or (most is not None and after - begin > most):
            begin, number = kept.offset, number + 1
        end = after
        numbered.append((number, kept, tensor.detach()))
    for (_, device), group in groupby(numbered, lambda each: (each[0], each[2].device)):
        run = list(group)
        octets = [tensor.view(-1).view(torch.uint8) for _, _, tensor in run]
        nbytes = sum(kept.entry.nbytes for _, kept, _ in run)
        yield _Run(run[0][1].offset, nbytes, octets, device.type == "cpu")


def _octets(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in the order of its elements, where it lies."""
    whole = plain(tensor).resolve_conj().resolve_neg().contiguous()
    return whole.view(-1).view(torch.uint8)


def _has_shape_of(tensor: Tensor | None, saved: Tensor) -> bool:
    return tensor is not None and (tensor.shape, tensor.dtype) == (saved.shape, saved.dtype)


def _put(place: Place, saved: Tensor) -> None:
    now = place.tensor
    if now is not None and _has_shape_of(now, saved):
        try:
            now.copy_(saved)
        except RuntimeError:  # elements share memory, or the tensor was made for inference
            pass
        else:
            return
    near = now if now is not None else next(place.owner.parameters(), saved)
    place.put(saved.to(near.device, copy=True))
