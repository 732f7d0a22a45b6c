"""Modules' buffers, written to the status page at every commit: each rank has its own.

Most are tiny and change with every forward, as the statistics of batch norms do; they are copied
together. Large ones are mostly constant: a mask, or a table of positions. They are copied only if
they may have changed since the same record of the page was written before.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from worker_hooks.contract.status_page import Entry
from worker_hooks.state.module import ModulePiece, Place
from worker_hooks.state.registry import Piece
from worker_hooks.state.snapshot import version
from worker_hooks.tensors.tensor_bytes import entry_of, to_bytes

log = logging.getLogger("msrun")

_SMALL_BYTES = 4096  # up to this size a copy costs less than a comparison
_QUICK_BYTES = 32 << 10  # torch concatenates up to this size without its other threads
_TRIALS = 4  # comparisons of a buffer's bytes before torch's version counter is trusted

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class _Kept(NamedTuple):
    """A buffer and its offset in a record."""

    place: Place
    entry: Entry
    offset: int


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


class Buffers:
    """The buffers of all registered modules, persistent or not."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = [piece for piece in pieces if isinstance(piece, ModulePiece)]
        self._known: list[tuple[dict[str, Tensor | None], str, Tensor, int]] | None = None
        self._absent: list[Place] = []
        self._runs: list[_Run] = []
        self._constants: list[_Constant] = []
        self._targets: dict[tuple[int, int], list[Tensor]] = {}
        self._warned: set[str] = set()
        self.unsaved: frozenset[str] = frozenset()
        """Buffers whose present size or type is not that of the page."""

    @cached_property
    def _places(self) -> list[Place]:
        return [place for piece in self._pieces for place in piece.places()]

    @cached_property
    def _kept(self) -> list[_Kept]:
        """Fixed when first asked for; those that are copied together come first."""
        found = [
            (_is_constant(place, tensor), place, entry_of(place.name, tensor))
            for place in self._places
            if (tensor := place.tensor) is not None
        ]
        found.sort(key=lambda each: each[0])
        kept, offset = [], 0
        for _, place, entry in found:
            kept.append(_Kept(place, entry, offset))
            offset += entry.nbytes
        return kept

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """What :meth:`fill` writes; fixed when first asked for.

        Raises:
            TypeError: a buffer has no plain bytes.
        """
        return tuple(kept.entry for kept in self._kept)

    @cached_property
    def nbytes(self) -> int:
        """How many bytes :meth:`fill` writes."""
        return sum(entry.nbytes for entry in self.entries)

    def renew(self) -> None:
        """Find all buffers anew: the modules are others, and another page will be made."""
        for name in ("_places", "_kept", "entries", "nbytes"):
            vars(self).pop(name, None)
        self._targets.clear()
        self.forget()

    def forget(self) -> None:
        """Write all of it next time: there is a new page."""
        self._known = None
        self._constants = []

    def fill(self, address: int, slot: int) -> int:
        """Write all buffers to a record of the page; return the count of bytes.

        Args:
            address: of the first byte.
            slot: which record it is.
        """
        if not self.nbytes and self._known is not None:
            return 0
        if not self._is_known():
            self._look_up()
        key = slot, address
        targets = self._targets.get(key)
        if targets is None:
            targets = [_memory(address + run.offset, run.nbytes) for run in self._runs]
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

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put buffers back, bit for bit; those that are not in ``tensors`` keep their values."""
        for place in (place for piece in self._pieces for place in piece.places()):
            if place.name in tensors:
                _put(place, tensors[place.name])

    def _is_known(self) -> bool:
        """Whether every buffer is still the same tensor at the same address."""
        if self._known is None:
            return False
        for held, key, tensor, address in self._known:
            if held.get(key) is not tensor or tensor.data_ptr() != address:
                return False
        return all(place.tensor is None for place in self._absent)

    def _look_up(self) -> None:
        """Look up every buffer again."""
        self._known = [
            (place.owner._buffers, place.key, tensor, tensor.data_ptr())  # noqa: SLF001
            for place in self._places
            if (tensor := place.tensor) is not None
        ]
        self._absent = [place for place in self._places if place.tensor is None]
        self._targets.clear()
        fitting = [(kept, tensor) for kept in self._kept if (tensor := _fitting(kept)) is not None]
        self._note_unsaved({kept.entry.name for kept, _ in fitting})
        self._constants = [
            next((each for each in self._constants if each.is_of(kept, tensor)), None)
            or _Constant(kept, tensor)
            for kept, tensor in fitting
            if _is_constant(kept.place, tensor)
        ]
        always = [pair for pair in fitting if not _is_constant(pair[0].place, pair[1])]
        self._runs = list(_runs(always))

    def _note_unsaved(self, fitting: set[str]) -> None:
        there = {place.name for place in self._places} - {place.name for place in self._absent}
        unsaved = frozenset(there | {entry.name for entry in self.entries}) - fitting
        for name in sorted(unsaved - self._warned):
            log.warning("buffer %s changed its size or type in training and is not saved", name)
        self._warned |= unsaved
        self.unsaved = unsaved


def _is_constant(place: Place, tensor: Tensor) -> bool:
    """Whether to check for changes before the buffer is copied.

    Not for a batch norm: torch does not count the changes of its statistics. Buffers that are not
    contiguous or no plain memory are treated as constant, too, because each is copied by itself.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return True
    return tensor.nbytes > _SMALL_BYTES and not isinstance(place.owner, _NormBase)


def _fitting(kept: _Kept) -> Tensor | None:
    """The buffer, if it still has the shape and type that it has on the page."""
    tensor = kept.place.tensor
    if tensor is None:
        return None
    return tensor if entry_of(kept.entry.name, tensor) == kept.entry else None


def _runs(pairs: list[tuple[_Kept, Tensor]]) -> Iterator[_Run]:
    """Groups of buffers that are adjacent in the record and on one device."""
    begin, end, number, numbered = 0, 0, 0, []
    for kept, tensor in pairs:
        after = kept.offset + kept.entry.nbytes
        if kept.offset != end or after - begin > _QUICK_BYTES:
            begin, number = kept.offset, number + 1
        end = after
        numbered.append((number, kept, tensor.detach()))
    for (_, device), group in groupby(numbered, lambda each: (each[0], each[2].device)):
        run = list(group)
        octets = [tensor.view(-1).view(torch.uint8) for _, _, tensor in run]
        nbytes = sum(kept.entry.nbytes for _, kept, _ in run)
        yield _Run(run[0][1].offset, nbytes, octets, device.type == "cpu")


def _memory(address: int, nbytes: int) -> Tensor:
    """Bytes of the page as a tensor."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def _put(place: Place, saved: Tensor) -> None:
    now = place.tensor
    if now is not None and now.shape == saved.shape and now.dtype == saved.dtype:
        try:
            now.copy_(saved)
        except RuntimeError:  # elements share memory, or the tensor was made for inference
            pass
        else:
            return
    near = now if now is not None else next(place.owner.parameters(), saved)
    place.owner._buffers[place.key] = saved.to(near.device)  # noqa: SLF001
