"""Reads a dump: tensors one at a time, from one file or several, into the registered objects.

The folder is verified before; nothing in it is executed or unpickled.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker_hooks.recovery.parallel_read import read_into
from worker_hooks.state.mismatch import listed
from worker_hooks.state.registry import Piece, as_now, boxes_of, restore_alike
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage import safetensors_file
from worker_hooks.storage.commit import EARLY_BUFFERS
from worker_hooks.storage.manifest import MEMORY_KIND, REPLICATED, Manifest, Shard
from worker_hooks.storage.memory_dump import HERE, HeldDump
from worker_hooks.storage.one_state import why_not_one
from worker_hooks.storage.shard_file import HAS, OBJECTS, REST
from worker_hooks.storage.tensor_parts import Block, JoinedTensor, Run, joined, runs
from worker_hooks.tensors import state_json
from worker_hooks.tensors.placements import Box
from worker_hooks.tensors.state_json import Json
from worker_hooks.tensors.tensor_bytes import plain, torch_dtype, view


class FarFiles:
    """Files of a dump in memory whose tensors are on another node, until they are read."""

    def __init__(
        self, variants: Mapping[Path, int], bring: Callable[[Collection[int]], Collection[int]]
    ) -> None:
        """None of them is here.

        Args:
            variants: of which state each is.
            bring: has the tensors of these states come; those that are still not here.
        """
        self._variants = variants
        self._bring = bring

    def brought(self, wanted: Iterable[Run]) -> list[Run]:
        """The same once what they are in is here: until then there are zeros in its place.

        Raises:
            OSError: it does not come.
        """
        found = list(wanted)
        absent = {self._variants[run.path] for run in found if run.path in self._variants}
        if absent:
            left = self._bring(sorted(absent))
            if absent & {*left}:
                raise OSError(errno.ENODATA, "the tensors that it reads are on another node")
            known = self._variants.items()
            self._variants = {path: variant for path, variant in known if variant in left}
        return found


class StoredTensor(NamedTuple):
    """A tensor of a dump, or the part of it that this rank has."""

    dtype: torch.dtype
    whole: JoinedTensor
    block: Block
    far: FarFiles | None = None  # among which its parts may be

    def read(self) -> Tensor:
        """The tensor, in new memory.

        Raises:
            OSError: a file cannot be read.
            ValueError: bytes are missing.
        """
        tensor = torch.empty(self.block.shape, dtype=self.dtype, device="cpu")
        self.read_into(tensor, is_new=True)
        return tensor

    def read_into(self, tensor: Tensor, *, is_new: bool = False) -> None:
        """Read into a contiguous tensor of this shape and type in host memory.

        ``is_new``: its memory was never used.

        Raises:
            OSError: a file cannot be read.
            ValueError: bytes are missing.
        """
        memory = view(tensor)
        parts: Iterable[Run] = runs(self.whole, self.block)
        if self.far is not None:
            parts = self.far.brought(parts)
        if read_into(memory, tensor.data_ptr(), parts, is_new=is_new) != len(memory):
            raise ValueError(f"parts of {self.whole.entry.name} are missing")


class Tensors(Mapping[str, Tensor]):
    """The tensors of a dump by name; each is read when it is accessed.

    Of those for which a box is known, only this box.
    """

    def __init__(
        self,
        stored: Mapping[str, JoinedTensor],
        boxes: Mapping[str, Box] = MappingProxyType({}),
        far: FarFiles | None = None,
    ) -> None:
        """``far``: what has yet to come to this node; ``None``: nothing."""
        self._stored = stored
        self._boxes = boxes
        self._far = far

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor; that of a number, if there is none."""
        whole = self._stored.get(name)
        return () if whole is None else whole.entry.shape

    def cut(self, boxes: Mapping[str, Box]) -> Tensors:
        """The same, but only these boxes of some of the tensors."""
        return Tensors(self._stored, boxes, self._far)

    def with_far(self, far: FarFiles) -> Tensors:
        """The same, of which these files have yet to come to this node."""
        return Tensors(self._stored, self._boxes, far)

    def __getitem__(self, name: str) -> Tensor:
        return self._of(name).read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def _of(self, name: str) -> StoredTensor:
        whole, box = self._stored[name], self._boxes.get(name)
        shape = whole.entry.shape
        # what has another shape does not fit, and is said to
        is_part = box is not None and box.whole == shape
        block = Block(box.offset, box.size) if box and is_part else Block((0,) * len(shape), shape)
        return StoredTensor(torch_dtype(whole.entry.dtype), whole, block, self._far)

    def put(self, name: str, target: Tensor) -> None:
        """Read a tensor into another one of its shape."""
        stored = self._of(name)
        is_plain = target.device.type == "cpu" and target.is_contiguous() and not target.is_neg()
        if is_plain and target.dtype == stored.dtype and target.shape == stored.block.shape:
            stored.read_into(plain(target.detach()))
            torch.autograd.graph.increment_version(target)  # as copy_ does
        else:
            target.copy_(stored.read())

    def like(self, names: Collection[str]) -> dict[str, Tensor]:
        """Tensors without data, of the same shapes and dtypes."""
        found = ((name, self._of(name)) for name in names)
        return {
            name: torch.empty(each.block.shape, dtype=each.dtype, device="meta")
            for name, each in found
        }


class LoadedState(NamedTuple):
    """A dump to resume from."""

    folder: Path
    manifest: Manifest
    tensors: Tensors
    values: dict[str, Json]  # the pieces' values without tensors, by the pieces' names
    metadata: dict[str, str]  # of the file that holds most of what its writer alone had
    held: HeldDump | None = None  # keeps the files open
    # of a checkpoint in memory: of the states, if there are several, and of their tensors
    variants: tuple[int, ...] = (0,)
    names: tuple[frozenset[str] | None, ...] = (None,)  # None: all

    @property
    def digest(self) -> str:
        """Of a checkpoint in memory: what the replicas of this rank say they hold."""
        return ",".join(self.digests)

    @property
    def digests(self) -> tuple[str, ...]:
        """The same by variant."""
        found = self.manifest.digest.split(",")
        return tuple(found[variant] for variant in self.variants)

    def private(self, rank: int) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """A rank's private state; ``None``: the dump has none.

        Returns:
            ``step``, ``epoch``, ``batch``, ``is_commit`` and ``meta``, the record's JSON; and its
            contents.

        Raises:
            OSError: the file cannot be read.
            ValueError: it was not written by msrun.
        """
        for shard in self.manifest.shards:
            if shard.kind == "private" and shard.rank == rank:
                nbytes = None if self.held is None else shard.nbytes
                return _private(self.folder / shard.file, shard.at, nbytes)
        return None


Bring = Callable[[int, Collection[int]], Collection[int]]
"""Fetches tensors of a dump in memory that are on another node; takes an inode of the dump and the
states that are wanted. Returns those that are still not here, and raises OSError."""


def open_in_memory(folder: Path, manifest: Manifest, rank: int, bring: Bring) -> LoadedState:
    """Open a checkpoint in the agent's memory; it stays readable if the agent drops it.

    Raises:
        OSError: the agent has dropped it already.
        ValueError: the files do not make up a state of this rank; the message says why.
    """
    held = HeldDump(folder, manifest)
    variants = manifests.variants_of(manifest, rank, manifest.world_size)
    saved = open_dump(HERE, held.manifest, variants)
    if held.manifest.absent:
        far = {
            HERE / shard.file: shard.variant
            for shard in held.manifest.shards
            if shard.kind == REPLICATED and shard.variant in held.manifest.absent
        }
        files = FarFiles(far, partial(bring, held.inode))
        saved = saved._replace(tensors=saved.tensors.with_far(files))
    return saved._replace(held=held, variants=variants)


def open_dump(folder: Path, manifest: Manifest, variants: tuple[int, ...] = (0,)) -> LoadedState:
    """Open a verified dump; tensors are read when they are accessed.

    Args:
        variants: which states, if there are several; none has anything that another one has
            differently.

    Raises:
        OSError: a file cannot be read.
        ValueError: the files do not make up a state; the message says why.
    """
    files, others = [], set[Path]()
    has = dict[int, frozenset[str] | None]()
    for shard in manifest.shards:
        if shard.kind != "replicated":
            continue
        path = folder / shard.file
        if shard.variant not in variants and not manifest.holders:
            continue
        header = _header(folder, manifest, shard)
        files.append((path, header))
        if shard.variant not in variants:  # they may have parts of distributed tensors
            others.add(path)
            continue
        try:
            known = header.metadata.get(HAS)
            has[shard.variant] = None if known is None else frozenset(json.loads(known))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} was not written by msrun: {error}") from error
    metadata = _metadata(folder, manifest, variants)
    try:
        stored = joined(files, has_replicas=True, others=others)
    except ValueError as error:
        raise ValueError(f"{folder} does not hold a whole state: {error}") from error
    try:
        values = {**_json(metadata, OBJECTS), **_json(metadata, REST)["pieces"]}
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} holds no state that msrun wrote: {error!r}") from error
    names = tuple(has.get(variant) for variant in variants)
    return LoadedState(folder, manifest, Tensors(stored), values, metadata, names=names)


def _header(folder: Path, manifest: Manifest, shard: Shard) -> safetensors_file.Header:
    """That of a file, of which there may be no more in memory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    is_in_memory = manifest.kind == MEMORY_KIND
    nbytes = shard.nbytes if is_in_memory else None
    return safetensors_file.read_header(folder / shard.file, shard.at, nbytes, is_cut=is_in_memory)


def _metadata(folder: Path, manifest: Manifest, variants: tuple[int, ...]) -> dict[str, str]:
    """Those of the file that has the most of what it names.

    Ranks of all nodes that resume from the same have the same: their orders of DDP's gradients, for
    one, decide whether they meet in a collective. So what counts on a node whose ranks have written
    files of their own are the headers of the others'.

    Raises:
        OSError: a file cannot be read.
        ValueError: one was not written by msrun.
    """
    most, found = -1, dict[str, str]()
    replaced = {shard.variant for shard in manifest.heads}
    shards = (each for each in manifest.shards if each.variant not in replaced)
    # not by their names: in memory these are numbers, others on each node
    for shard in sorted((*shards, *manifest.heads), key=lambda each: (each.variant, each.rank)):
        if shard.kind != "replicated" or shard.variant not in variants:
            continue
        header = _header(folder, manifest, shard)
        try:
            named = state_json.names_in(_json(header.metadata, OBJECTS))
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{shard.file} was not written by msrun: {error}") from error
        count = len(named & {entry.name for entry in header.entries})
        if count > most:
            most, found = count, header.metadata
    return found


def variants_for(folder: Path, manifest: Manifest, rank: int, world_size: int) -> tuple[int, ...]:
    """Which variants of the state a rank resumes from.

    Of groups that make up one state any one does: what is distributed is read from all of them.

    Raises:
        OSError: a file cannot be read.
        ValueError: none is this rank's; the message says why.
    """
    if manifest.is_disputed or not manifest.holders or manifest.world_size == world_size:
        return manifests.variants_of(manifest, rank, world_size)
    if why := why_not_one(manifests.files_by_group(folder, manifest)):
        raise ValueError(
            f"each of {manifest.world_size} ranks saved its own part of the state, and {why}: "
            f"{world_size} ranks cannot resume from it"
        )
    return manifests.variants_of(manifest, manifest.holders[0][0], manifest.world_size)


def restore(
    pieces: Sequence[Piece],
    saved: LoadedState,
    *,
    is_live: bool = False,
    is_all: bool = True,
    may_follow: Collection[str] = (),
) -> frozenset[str]:
    """Restore the replicated state, bit for bit; nothing is changed if it does not fit.

    Args:
        is_live: large tensors are known to be as saved, and are not read.
        is_all: these are all registered pieces.
        may_follow: names of pieces that may lack something yet: of these what is there is restored.

    Returns:
        The names of those that do lack something; they are to be restored again.

    Raises:
        OSError: a file cannot be read.
        ValueError: it does not fit what is registered; the message names everything that does not.
    """
    names = {piece.name for piece in pieces}
    saved = _as_now(pieces, saved)
    found, unlike = [], dict[str, Mapping[str, Tensor]]()
    if missing := names - saved.values.keys():
        found.append(f"it has no {listed(missing)}")
    if is_all and (unexpected := saved.values.keys() - names):
        found.append(f"it has {listed(unexpected)}, which is not registered")
    mine = _by_piece(saved.tensors, names | saved.values.keys())
    for piece in pieces:
        if piece.name in saved.values:
            like = saved.tensors.like(mine[piece.name])
            amiss = piece.mismatches(like, saved.values[piece.name])
            if amiss and piece.name in may_follow:
                unlike[piece.name] = like
            else:
                found += amiss
    if found:
        which = saved.folder if saved.held is None else "the state in msrun's memory"
        raise ValueError(f"{which} does not fit this script: {'; '.join(found)}")
    for piece in pieces:  # one tensor at a time, so the extra memory is that of the largest
        if piece.name in unlike:
            restore_alike(piece, saved.tensors, unlike[piece.name], saved.values[piece.name])
            continue
        live = piece.tensors() if is_live else {}
        piece.restore(_LiveOrSaved(live, saved.tensors), saved.values[piece.name])
    return frozenset(unlike)


def _as_now(pieces: Sequence[Piece], saved: LoadedState) -> LoadedState:
    """The state with this rank's parts of distributed tensors, and its order of parameters."""
    values, boxes = dict(saved.values), dict[str, Box]()
    for piece in pieces:
        if piece.name in values:
            values[piece.name] = as_now(piece, values[piece.name], saved.tensors.shape_of)
        boxes |= boxes_of(piece, values.get(piece.name))
    return saved._replace(tensors=saved.tensors.cut(boxes), values=values)


class _LiveOrSaved(Mapping[str, Tensor]):
    """The live tensors, and the saved ones of all other names."""

    def __init__(self, live: Mapping[str, Tensor], saved: Tensors) -> None:
        self._live, self._saved = live, saved

    def __getitem__(self, name: str) -> Tensor:
        return self._live[name] if name in self._live else self._saved[name]

    def put(self, name: str, target: Tensor) -> None:
        if self._live.get(name) is not target:
            self._saved.put(name, target)

    def __iter__(self) -> Iterator[str]:
        return iter(self._live.keys() | self._saved.keys())

    def __len__(self) -> int:
        return len(self._live.keys() | self._saved.keys())


def _by_piece(names: Collection[str], owners: Collection[str]) -> dict[str, list[str]]:
    """Names of tensors by their piece: the one with the longest name that they begin with."""
    owned: dict[str, list[str]] = {owner: [] for owner in owners}
    for name in names:
        owner = name
        while owner not in owned and owner:
            owner = owner.rpartition(".")[0]
        if owner:
            owned[owner].append(name)
    return owned


def _json(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    value = json.loads(metadata.get(key, "{}"))
    if not isinstance(value, dict):
        raise TypeError(f"its {key} is no object")
    return value


def _private(path: Path, at: int, nbytes: int | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    header = safetensors_file.read_header(path, at, nbytes)
    tensors = Tensors(joined([(path, header)], has_replicas=False))
    held = {name: tensors[name] for name in tensors}
    try:
        record = {key: int(header.metadata[key]) for key in ("step", "epoch", "batch", "is_commit")}
        if EARLY_BUFFERS in header.metadata:
            record[EARLY_BUFFERS] = 1
        return {**record, "meta": json.loads(header.metadata["record"])}, held
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} was not written by msrun: {error!r}") from error
