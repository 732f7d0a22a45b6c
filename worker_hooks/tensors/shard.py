"""A shard: a replica's live state, or its part of it, as one file of a dump.

A rank's listener writes it while the main thread is held, from memory that is neither copied nor
changed. The file is what torch's distributed checkpoints call a shard: their reader of safetensors
folders loads it as it is, also into another number of ranks.
"""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from worker_hooks.contract.status_page import Entry
from worker_hooks.device.side_stream import HOST, DeviceAccess
from worker_hooks.machine.kept_memory import KEPT, kept_digest
from worker_hooks.storage import safetensors_file
from worker_hooks.storage.checksum import Blocks, Bytes
from worker_hooks.storage.safetensors_file import BITS
from worker_hooks.storage.shard_file import (
    DISTRIBUTED,
    GLOBAL_SHAPE,
    HAS,
    OFFSETS,
    REST,
    SHARDING,
    WrittenShard,
    digest_of,
)
from worker_hooks.storage.shard_file import write as write_part
from worker_hooks.tensors import state_json
from worker_hooks.tensors.device_digest import add_tensor, is_summed_there
from worker_hooks.tensors.fast_digest import FastDigest
from worker_hooks.tensors.placements import Box
from worker_hooks.tensors.reader import Reader
from worker_hooks.tensors.tensor_bytes import entry_of, plain

_WHOLE = 1 << 20  # bytes; smaller tensors are not cut
FORMAT = {"DCP_VERSION": "1.0", "format": "pt"}
"""What every shard's metadata say."""


class Replica(NamedTuple):
    """The state of a rank that its replicas hold, too, and what else is saved in its file."""

    tensors: Mapping[str, torch.Tensor]  # equal on all replicas
    buffers: Sequence[tuple[Entry, memoryview]]  # this rank's own; not in the digest
    rest: str  # JSON of everything but tensors; equal on all replicas
    metadata: Mapping[str, str]  # free; not in the digest
    access: DeviceAccess = HOST
    boxes: Mapping[str, Box] = MappingProxyType({})  # of the tensors that are distributed
    compared: str = ""  # what the digest covers of ``rest``; empty: all

    def only(self, names: Collection[str] | None) -> Replica:
        """What of it other ranks hold with this one, if not all; ``None``: all."""
        if names is None:
            return self
        kept = frozenset(names)
        return self._replace(
            tensors={name: each for name, each in self.tensors.items() if name in kept},
            boxes={name: each for name, each in self.boxes.items() if name in kept},
            # where tensors lie that are left out is not the same on all of them
            compared=state_json.dumps(state_json.without_places(json.loads(self.rest))),
            metadata={**self.metadata, HAS: json.dumps(sorted(kept))},
        )

    @property
    def is_on_device(self) -> bool:
        """Whether some of it is on an accelerator, as then on all replicas."""
        return any(each.device.type != "cpu" for each in self.tensors.values())


class ShardPlan(NamedTuple):
    """How a part is to be written; the bytes stay in live memory."""

    head: bytes  # of the part's file
    seed: str  # hexadecimal sha256 of what the digest covers besides the bytes
    cuts: Sequence[TensorCut]  # of the whole state's tensors in order
    buffers: Sequence[memoryview]  # the file's last tensors

    @property
    def segments(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """The state in order, and whether this part has it."""
        return (segment for cut in self.cuts for segment in cut.segments)

    def pieces(self, reader: Reader) -> Iterator[tuple[memoryview, bool]]:
        """The state's bytes in order, and whether this part has them."""
        for segment, is_mine in self.segments:
            for piece in reader.pieces(segment):
                yield piece, is_mine


class TensorCut(NamedTuple):
    """The rows of a tensor along ``dim`` that a part has; without a ``dim``: all or none."""

    entry: Entry  # of the whole tensor
    tensor: torch.Tensor
    dim: int | None
    start: int
    stop: int
    box: Box | None = None  # of the rank's whole part, if the tensor is distributed

    @property
    def is_written(self) -> bool:
        """Whether the part has any of it; a rank may have nothing of a distributed tensor."""
        box, has_any = self.box, bool(self.entry.nbytes)
        return self.start < self.stop and (box is None or has_any or 0 in box.whole)

    @property
    def place(self) -> dict[str, Any]:
        """Where the rows belong in the whole tensor, as a file's metadata say."""
        place: dict[str, Any] = {OFFSETS: [0] * len(safetensors_file.stored(self.entry).shape)}
        if self.box is not None:
            place |= {GLOBAL_SHAPE: list(self.box.whole), DISTRIBUTED: True}
            place[OFFSETS][: len(self.box.offset)] = self.box.offset
        elif self.share != self.entry:
            place[GLOBAL_SHAPE] = list(self.entry.shape)
        if self.dim is not None:
            place[OFFSETS][self.dim] += self.start
        return place

    @property
    def share(self) -> Entry:
        """The rows as a tensor of their own."""
        if self.dim is None:
            return self.entry
        name, dtype, shape, nbytes = self.entry
        rows = self.stop - self.start
        cut = (*shape[: self.dim], rows, *shape[self.dim + 1 :])
        return Entry(name, dtype, cut, nbytes // shape[self.dim] * rows)

    @property
    def segments(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """The tensor's elements in their order, and whether this part has them."""
        tensor = plain(self.tensor)
        if self.dim is None:
            yield tensor, self.start < self.stop
            return
        ends = (0, self.start, self.stop, tensor.shape[self.dim])
        for start, stop in pairwise(ends):
            yield tensor.narrow(self.dim, start, stop - start), start == self.start < self.stop


def digest(replica: Replica, advance: Callable[[int], None]) -> str:
    """A text that is equal on two replicas if their whole state is.

    Of host memory a checksum; of accelerators what :func:`quick_digest` finds, as each device sums
    up what it holds: all of it would go over the link otherwise.

    Args:
        replica: does not change meanwhile.
        advance: called with each count of bytes that were read; may raise, to give up.

    Raises:
        TypeError: there is a tensor that cannot be saved.
    """
    if replica.is_on_device:
        return quick_digest(replica, advance)
    reader = Reader(replica.access)
    cuts = _cuts(replica, 0, 1)
    with Blocks() as blocks:
        for cut in cuts:
            for piece in reader.pieces(cut.tensor):
                blocks.add(piece)
                advance(len(piece))
        return digest_of(_seed(cuts, replica), blocks.hashes())


def quick_digest(replica: Replica, advance: Callable[[int], None] = lambda _: None) -> str:
    """The same by :class:`FastDigest`: at memory speed, and good enough to find accidents.

    Raises:
        RuntimeError: a device has failed.
        TypeError: there is a tensor that cannot be saved.
    """
    reader, cuts = Reader(replica.access), _cuts(replica, 0, 1)
    found = FastDigest(cut.entry.nbytes for cut in cuts)
    for cut in cuts:
        add_tensor(found, cut.tensor, reader, advance)
    return found.digest(_seed(cuts, replica))


def digest_like(other: str, replica: Replica) -> str:
    """The digest of the kind that another one is, so that it is equal if the state is.

    Args:
        other: of :func:`quick_digest`, or what was read in the memory of killed ranks by a process
            without torch.
        replica: does not change meanwhile.

    Raises:
        RuntimeError, TypeError: as :func:`quick_digest`.
    """
    if not other.startswith(KEPT):
        return quick_digest(replica)
    reader, cuts, found = Reader(replica.access), _cuts(replica, 0, 1), 0
    for cut in cuts:
        for piece in reader.pieces(cut.tensor):
            found = zlib.crc32(piece, found)
    return kept_digest(_seed(cuts, replica), found)


def plan(replica: Replica, part: int, parts: int) -> ShardPlan:
    """Plan part ``part`` of ``parts`` equal parts; part 0 holds the buffers, too.

    Raises:
        TypeError: there is a tensor that cannot be saved.
        ValueError: two tensors have one name, or there is no such part.
    """
    if not 0 <= part < parts:
        raise ValueError(f"there is no part {part} of {parts}")
    cuts = _cuts(replica, part, parts)
    buffers = replica.buffers if part == 0 else ()
    head = _header(replica, [cut for cut in cuts if cut.is_written], buffers)
    contents = [content for _, content in buffers]
    return ShardPlan(head, _seed(cuts, replica), cuts, contents)


def write(
    path: Path, replica: Replica, part: int, parts: int, advance: Callable[[int], None]
) -> WrittenShard:
    """Write part ``part`` of ``parts`` equal parts, and take the digest of the whole state.

    Extra memory is at most 64 MB. Part 0 holds the buffers, too.

    Args:
        path: in an existing folder; the completion of the dump includes that folder's fsync.
        replica: does not change meanwhile.
        part: from 0.
        advance: called with each count of bytes that are done; may raise, to give up.

    Raises:
        OSError: the file cannot be written; it is removed.
        TypeError: there is a tensor that cannot be saved.
        ValueError: two tensors have one name, or there is no such part.
    """
    planned, reader = plan(replica, part, parts), Reader(replica.access)
    head, seed, buffers = planned.head, planned.seed, planned.buffers
    if replica.is_on_device:
        mine = (segment for segment, is_mine in planned.segments if is_mine)
        own = ((piece, True) for segment in mine for piece in reader.pieces(segment))
        done = write_part(path, head, seed, own, buffers, advance, is_whole=True)
        return done._replace(digest=quick_digest(replica, lambda _: advance(0)))
    pieces = planned.pieces(reader)
    return write_part(path, head, seed, pieces, buffers, advance, is_whole=parts == 1)


def write_quick(
    path: Path, replica: Replica, part: int, parts: int, advance: Callable[[int], None]
) -> WrittenShard:
    """Write the same file as :func:`write`, but into existing memory and without a checksum.

    Of a tensor that its accelerator sums up itself only what the part has is read. All others are
    read once, for the digest and for the file.

    Args:
        path: of an empty file in memory.
        replica: does not change meanwhile.
        part: from 0.
        advance: called with each count of bytes that are done; may raise, to give up.

    Raises:
        OSError: the memory is exhausted, or its owner is gone.
        RuntimeError: a device has failed.
        TypeError: there is a tensor that cannot be saved.
        ValueError: two tensors have one name, or there is no such part.
    """
    planned, reader = plan(replica, part, parts), Reader(replica.access)
    found = FastDigest(cut.entry.nbytes for cut in planned.cuts)
    with open(path, "r+b", buffering=0) as file:
        nbytes = _put(file, planned.head)
        for cut in planned.cuts:
            is_digested = is_summed_there(cut.tensor, reader)
            if is_digested:
                add_tensor(found, cut.tensor, reader, advance)
            for segment, is_mine in cut.segments:
                if is_digested and not is_mine:
                    continue
                for piece in reader.pieces(segment):
                    if not is_digested:
                        found.add(piece)
                    if is_mine:
                        nbytes += _put(file, piece)
                    advance(0 if is_digested else len(piece))
        for content in planned.buffers:
            nbytes += _put(file, content)
    return WrittenShard(nbytes, "", found.digest(planned.seed))


def _put(file: io.FileIO, content: Bytes) -> int:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]
    return len(content)


def whole_cuts(tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Box]) -> list[TensorCut]:
    """All of the state as the file of a single writer has it.

    Raises:
        TypeError: there is a tensor that cannot be saved.
    """
    return _cuts(Replica(tensors, (), "", {}, boxes=boxes), 0, 1)


def _cuts(replica: Replica, part: int, parts: int) -> list[TensorCut]:
    """All tensors in the order of the file: the largest elements first, so that all are aligned."""
    found = [(entry_of(name, tensor), tensor) for name, tensor in replica.tensors.items()]
    found.sort(key=lambda each: (-BITS[each[0].dtype], each[0].name))
    total = sum(entry.nbytes for entry, _ in found)
    edges = total * part // parts, total * (part + 1) // parts if part + 1 < parts else total + 1
    cuts, at = [], 0
    for entry, tensor in found:
        dim = _dim(entry)
        rows = 1 if dim is None else entry.shape[dim]
        row = max(1, entry.nbytes // rows)
        # cut at the rows nearest to the edges
        start, stop = (min(max(0, (2 * (edge - at) + row) // (2 * row)), rows) for edge in edges)
        cuts.append(TensorCut(entry, tensor, dim, start, stop, replica.boxes.get(entry.name)))
        at += entry.nbytes
    return cuts


def _dim(entry: Entry) -> int | None:
    """The dimension along which a large tensor is cut: the first that has several rows."""
    if entry.nbytes <= _WHOLE:
        return None
    return next(dim for dim, size in enumerate(entry.shape) if size > 1)


def _header(
    replica: Replica, cuts: Sequence[TensorCut], buffers: Sequence[tuple[Entry, memoryview]]
) -> bytes:
    entries = [*(cut.share for cut in cuts), *(entry for entry, _ in buffers)]
    places = {SHARDING: sharding(cuts, entries)}
    metadata = {**replica.metadata, REST: replica.rest, **places, **FORMAT}
    return safetensors_file.header(entries, metadata)


def sharding(cuts: Sequence[TensorCut], entries: Sequence[Entry]) -> str:
    """Where the tensors of a file belong, as torch's reader wants it: JSON.

    ``cuts``: what the file has of the state.
    """
    places = {
        entry.name: {OFFSETS: [0] * len(safetensors_file.stored(entry).shape)} for entry in entries
    }
    return json.dumps(places | {cut.entry.name: cut.place for cut in cuts})


def _seed(cuts: Sequence[TensorCut], replica: Replica) -> str:
    return seed_of(*seed_texts(cuts), json.dumps(replica.compared or replica.rest))


def seed_texts(cuts: Sequence[TensorCut]) -> tuple[str, str]:
    """What a digest covers of the tensors besides their bytes: what they are, and their boxes."""
    boxes = [cut.box for cut in cuts if cut.box is not None]
    return json.dumps([cut.entry for cut in cuts]), json.dumps(boxes) if boxes else ""


def seed_of(entries: str, boxes: str, rest: str) -> str:
    """What a digest covers besides bytes, as hexadecimal sha256.

    Args:
        entries: of :func:`seed_texts`.
        rest: the state that is no tensor: a JSON string, which has JSON inside.
    """
    told = ", ".join(filter(None, (entries, rest, boxes)))
    return hashlib.sha256(f"[{told}]".encode()).hexdigest()
