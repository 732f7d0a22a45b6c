"""Joins the parts of tensors in several files.

A file says in ``DCP_SHARDING_INFO`` where its part of a tensor begins. Parts may be cut along any
dimensions; they are read as runs of bytes, in the order of the complete tensor or of a block of it.
Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from operator import add, gt, sub
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from worker_hooks.contract.status_page import Entry
from worker_hooks.storage.safetensors_file import BITS, Header
from worker_hooks.storage.shard_file import DISTRIBUTED, GLOBAL_SHAPE, OFFSETS, SHARDING

Shape = tuple[int, ...]

_MOST_KEPT = 1024  # rows whose runs are kept


class Block(NamedTuple):
    """Consecutive indices of a tensor in each dimension."""

    offsets: Shape
    shape: Shape


class TensorPart(NamedTuple):
    """A block of a tensor, in a file from byte ``at`` on."""

    offsets: Shape
    shape: Shape
    path: Path
    at: int


class _Clip(NamedTuple):
    """What a part has of a block of the tensor."""

    offsets: Shape  # in the block
    shape: Shape
    stored: Shape  # of the part, which may be larger
    part: TensorPart

    def is_run(self, shape: Shape, dim: int) -> bool:
        """Whether it has all of the block's indices behind a dimension, and nothing between."""
        return self.shape[dim:] == shape[dim:] == self.stored[dim:]


class JoinedTensor(NamedTuple):
    """A complete tensor with its parts; ``entry`` describes all of it."""

    entry: Entry
    parts: tuple[TensorPart, ...]


class Run(NamedTuple):
    """Consecutive bytes of a tensor in a file."""

    path: Path
    at: int
    nbytes: int


class _FilePart(NamedTuple):
    """What one file holds of a tensor."""

    dtype: str
    part: TensorPart
    shape: Shape | None  # of the complete tensor, if the file says it


def joined(
    files: Iterable[tuple[Path, Header]],
    *,
    has_replicas: bool,
    others: Collection[Path] = (),
    only: Collection[str] | None = None,
) -> dict[str, JoinedTensor]:
    """The tensors that several files hold together, by name.

    Args:
        has_replicas: the same part in two files is the same state, as a manifest promises; else
            it is an error.
        others: those of the files whose tensors belong to other ranks, but for distributed ones;
            of these what the other files have is taken from them.
        only: names of the tensors that are wanted; ``None``: all.

    Raises:
        ValueError: parts of the tensor that it names are missing or do not fit each other.
    """
    found = _found(sorted(files, key=lambda each: each[0] in others), others, only)
    if others:
        found = {name: _without_other(parts, others) for name, parts in found.items()}
    return {name: _whole(name, parts, has_replicas=has_replicas) for name, parts in found.items()}


def overlaps(
    files: Sequence[tuple[Path, Header]],
) -> Iterator[tuple[JoinedTensor, JoinedTensor, Block]]:
    """What several of these files hold of a distributed tensor: two of its parts, and the block.

    Each of more than two is there with the first one.

    Raises:
        ValueError: parts of a tensor are missing, or do not fit each other.
    """
    for name, found in _found(files, {path for path, _ in files}, None).items():
        entry = _whole(name, found, has_replicas=True).entry
        firsts: dict[tuple[Shape, Shape], TensorPart] = {}
        for part in (each.part for each in found):
            first = firsts.setdefault(part[:2], part)
            if first is not part:
                yield _of(entry, first), _of(entry, part), Block(part.offsets, part.shape)
        if sum(math.prod(part.shape) for part in firsts.values()) <= math.prod(entry.shape):
            continue  # they cover all of it, so that no two of them meet
        for one, other in combinations(firsts.values(), 2):
            if (clip := _clip(one, other.offsets, other.shape)) is not None:
                at = tuple(map(add, clip[0].offsets, other.offsets))
                yield _of(entry, one), _of(entry, other), Block(at, clip[0].shape)


def nbytes_of(whole: JoinedTensor, block: Block) -> int:
    """The size of a block of a tensor."""
    return math.prod(block.shape) * BITS[whole.entry.dtype] // 8


def _of(entry: Entry, part: TensorPart) -> JoinedTensor:
    return JoinedTensor(entry, (part,))


def _found(
    files: Iterable[tuple[Path, Header]],
    others: Collection[Path],
    only: Collection[str] | None,
) -> dict[str, list[_FilePart]]:
    found: dict[str, list[_FilePart]] = {}
    for path, header in files:
        places = places_in(path, header)
        at, is_other = header.data_offset, path in others
        for entry in header.entries:
            is_mine = not is_other or is_distributed(places, entry.name)
            if is_mine and (only is None or entry.name in only):
                found.setdefault(entry.name, []).append(_part(entry, path, at, places))
            at += entry.nbytes
    return found


def parts_in(files: Iterable[tuple[Path, Header]]) -> Iterator[tuple[str, TensorPart]]:
    """What the files hold, by the tensors' names.

    Raises:
        ValueError: a file does not say where its part belongs.
    """
    for name, found in _found(files, (), None).items():
        yield from ((name, each.part) for each in found)


def is_distributed(places: Mapping[str, Any], name: str) -> bool:
    """Whether other ranks hold other parts of a tensor, as its file's metadata say."""
    place = places.get(name)
    return isinstance(place, dict) and place.get(DISTRIBUTED) is True


def places_in(path: Path, header: Header) -> Mapping[str, Any]:
    """What a file says of the places of its parts, by name.

    Raises:
        ValueError: it says nothing that makes sense.
    """
    try:
        places = json.loads(header.metadata.get(SHARDING, "{}"))
    except (ValueError, RecursionError):
        places = None
    if not isinstance(places, dict):
        raise ValueError(f"the {SHARDING} of {path} is not a JSON object")  # noqa: TRY004
    return places


def _without_other(found: Sequence[_FilePart], others: Collection[Path]) -> list[_FilePart]:
    """Without parts of other ranks of what is there already: another tensor may have this name."""
    mine = [each.part for each in found if each.part.path not in others]
    if not mine or len({len(each.part.shape) for each in found}) > 1:
        return list(found)
    start = tuple(map(min, zip(*(part.offsets for part in mine), strict=True)))
    ends = (map(add, part.offsets, part.shape) for part in mine)
    shape = tuple(map(sub, map(max, zip(*ends, strict=True)), start))
    if math.prod(shape) != sum(math.prod(part.shape) for part in mine):
        return list(found)  # they are not all of a box
    return [
        each
        for each in found
        if each.part.path not in others
        or (clip := _clip(each.part, start, shape)) is None
        or clip[0].shape != each.part.shape
    ]


def _part(entry: Entry, path: Path, at: int, places: Mapping[str, Any]) -> _FilePart:
    rank = len(entry.shape)
    try:
        place = places.get(entry.name, {})
        offsets = _sizes(place.get(OFFSETS, [0] * rank), rank)
        shape = _sizes(place[GLOBAL_SHAPE], rank) if GLOBAL_SHAPE in place else None
    except (TypeError, AttributeError):
        raise ValueError(f"{path} does not say where its part of {entry.name} belongs") from None
    return _FilePart(entry.dtype, TensorPart(offsets, entry.shape, path, at), shape)


def _sizes(value: Any, count: int) -> Shape:
    """The first ``count`` of a list of sizes; a disguised type has one dimension more."""
    if not isinstance(value, list) or len(value) < count:
        raise TypeError
    if not all(type(number) is int and number >= 0 for number in value):
        raise TypeError
    return tuple(value[:count])


def _whole(name: str, found: Sequence[_FilePart], *, has_replicas: bool) -> JoinedTensor:
    shapes = {each.shape for each in found if each.shape is not None}
    ends = [tuple(map(add, each.part.offsets, each.part.shape)) for each in found]
    shape = next(iter(shapes)) if shapes else tuple(map(max, zip(*ends, strict=False)))
    is_alike = len(shapes) <= 1 and len({(each.dtype, len(each.part.shape)) for each in found}) == 1
    if not is_alike or any(any(map(gt, end, shape)) for end in ends):
        raise ValueError(f"the parts of {name} differ in their types or shapes")
    parts: dict[tuple[Shape, Shape], TensorPart] = {}
    for each in found:
        first = parts.setdefault(each.part[:2], each.part)
        if first is not each.part and not has_replicas:
            raise ValueError(f"{name} is in {first.path} and in {each.part.path}: name one of them")
    if math.prod(shape) and not _covers(shape, 0, list(parts.values())):
        raise ValueError(f"parts of {name} are missing")
    dtype = found[0].dtype
    nbytes = math.prod(shape) * BITS[dtype] // 8
    return JoinedTensor(Entry(name, dtype, shape, nbytes), tuple(parts.values()))


def _covers(shape: Shape, dim: int, parts: Sequence[TensorPart]) -> bool:
    """Whether the parts cover every element, from a dimension on."""
    if any(part.shape[dim:] == shape[dim:] for part in parts):
        return True
    edges = _edges(dim, parts)
    if edges[:1] != [0] or edges[-1] != shape[dim]:
        return False
    return all(
        bool(inside := [part for part in parts if _spans(part, dim, start, stop)])
        and _covers(shape, dim + 1, inside)
        for start, stop in pairwise(edges)
    )


def _edges(dim: int, parts: Iterable[TensorPart | _Clip]) -> list[int]:
    spans = ((part.offsets[dim], part.shape[dim]) for part in parts)
    return sorted({edge for start, size in spans for edge in (start, start + size)})


def _spans(part: TensorPart | _Clip, dim: int, start: int, stop: int) -> bool:
    at = part.offsets[dim]
    return at <= start and stop <= at + part.shape[dim]


def runs(whole: JoinedTensor, block: Block | None = None) -> Iterator[Run]:
    """Where the bytes of a tensor, or of a block of it, are, in order.

    Raises:
        ValueError: the tensor was cut within a byte.
    """
    offsets, shape = block or Block((0,) * len(whole.entry.shape), whole.entry.shape)
    if not whole.entry.nbytes or not math.prod(shape):
        return
    bits = BITS[whole.entry.dtype]
    clips = [one for part in whole.parts if (one := _clip(part, offsets, shape)) is not None]
    for clip, index, count in _blocks(shape, 0, clips):
        if index * bits % 8 or count * bits % 8:
            raise ValueError(f"{whole.entry.name} was cut within a byte")
        yield Run(clip.part.path, clip.part.at + index * bits // 8, count * bits // 8)


def _clip(part: TensorPart, offsets: Shape, shape: Shape) -> tuple[_Clip, int] | None:
    """What a part has of a block, and the index of the first element in the part."""
    starts = tuple(map(max, part.offsets, offsets))
    ends = (
        min(at + size, first + count)
        for at, size, first, count in zip(part.offsets, part.shape, offsets, shape, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    if any(size <= 0 for size in sizes):
        return None
    index = 0
    for start, at, size in zip(starts, part.offsets, part.shape, strict=True):
        index = index * size + start - at
    inside = tuple(start - first for start, first in zip(starts, offsets, strict=True))
    return _Clip(inside, sizes, part.shape, part), index


def _blocks(
    shape: Shape, dim: int, clips: Sequence[tuple[_Clip, int]]
) -> Iterator[tuple[_Clip, int, int]]:
    """Consecutive elements of a part: the first one's index in it, and how many.

    ``clips`` come with the index of their first relevant element.
    """
    for clip, index in clips:
        if clip.shape[dim:] == shape[dim:] and clip.is_run(shape, dim + 1):
            yield clip, index, math.prod(shape[dim:])
            return
    for start, stop in pairwise(_edges(dim, (clip for clip, _ in clips))):
        inside = [
            (clip, index + (start - clip.offsets[dim]) * math.prod(clip.stored[dim + 1 :]))
            for clip, index in clips
            if _spans(clip, dim, start, stop)
        ]
        full = next((one for one in inside if one[0].is_run(shape, dim + 1)), None)
        if full is not None:
            yield *full, (stop - start) * math.prod(shape[dim + 1 :])
            continue
        rows, steps = stop - start, [math.prod(clip.stored[dim + 1 :]) for clip, _ in inside]
        if math.prod(shape[dim + 1 : -1]) > _MOST_KEPT:
            for row in range(rows):
                pairs = zip(inside, steps, strict=True)
                moved = [(clip, index + row * step) for (clip, index), step in pairs]
                yield from _blocks(shape, dim + 1, moved)
            continue
        # all rows are cut alike, and there may be millions
        step_of = {id(clip): step for (clip, _), step in zip(inside, steps, strict=True)}
        first = [(*one, step_of[id(one[0])]) for one in _blocks(shape, dim + 1, inside)]
        for row in range(rows):
            for clip, index, count, step in first:
                yield clip, index + row * step, count


def pieces(found: Iterable[Run], size: int, room: int) -> Iterator[bytes]:
    """The bytes of these runs in order, joined.

    Args:
        found: of one tensor, for example.
        size: bytes of each piece but the last one.
        room: bytes that are read ahead of each file.

    Raises:
        OSError: a file cannot be read.
        ValueError: one has become shorter.
    """
    with contextlib.ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}
        ends: dict[Path, int] = {}
        held, size_held = list[bytes](), 0
        for path, start, nbytes in found:
            if path not in files:
                files[path] = stack.enter_context(open(path, "rb", buffering=room))
            file = files[path]
            if ends.get(path) != start:
                file.seek(start)
            ends[path] = start + nbytes
            left = nbytes
            while left:
                held.append(read := file.read(min(left, size - size_held)))
                if not read:
                    raise ValueError(f"{path} ends too early")
                left -= len(read)
                size_held += len(read)
                if size_held == size:
                    yield b"".join(held)
                    held, size_held = [], 0
        if held:
            yield b"".join(held)
