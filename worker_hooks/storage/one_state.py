"""Whether the files of several replica groups make up one state, which anybody may read.

Their parts of distributed tensors do. But a tensor that is not distributed may have one name in all
groups and another content in each, as the layers of a pipeline have. Nobody says which: it is seen.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from worker_hooks.storage.safetensors_file import Header
from worker_hooks.storage.tensor_parts import (
    JoinedTensor,
    is_distributed,
    joined,
    places_in,
    runs,
)

_PIECE = 1 << 20  # bytes, read at once

Files = Sequence[tuple[Path, Header]]


def why_not_one(groups: Sequence[Files], most: int | None = None) -> str:
    """Why the files of these groups are no parts of one state, as text; empty: they are.

    Args:
        groups: the files of each replica group, with their headers.
        most: bytes that may be compared; more count as different.

    Raises:
        OSError: a file cannot be read.
        ValueError: parts of a tensor are missing, or do not fit each other.
    """
    wholes = [_undistributed(files) for files in groups]
    seen: dict[str, JoinedTensor] = {}
    pairs: list[tuple[JoinedTensor, JoinedTensor]] = []
    for group in wholes:
        for name, whole in group.items():
            first = seen.setdefault(name, whole)
            if first is not whole:
                pairs.append((first, whole))
    for first, whole in pairs:
        if first.entry != whole.entry:
            return f"{whole.entry.name} is not the same in all groups of ranks"
    if most is not None and sum(whole.entry.nbytes for _, whole in pairs) > most:
        return "what is not distributed is too large to be compared"
    differing = (whole.entry.name for first, whole in pairs if not _are_equal(first, whole))
    return next((f"{name} is not the same in all groups of ranks" for name in differing), "")


def _undistributed(files: Files) -> Mapping[str, JoinedTensor]:
    """The tensors of a group that are not distributed, or are held by it alone."""
    places = {path: places_in(path, header) for path, header in files}
    names = {
        entry.name
        for path, header in files
        for entry in header.entries
        if not is_distributed(places[path], entry.name)
    }
    return joined(files, has_replicas=True, only=names)


def _are_equal(one: JoinedTensor, other: JoinedTensor) -> bool:
    return all(pair[0] == pair[1] for pair in zip(_pieces(one), _pieces(other), strict=True))


def _pieces(whole: JoinedTensor) -> Iterator[bytes]:
    """The tensor's bytes in order, in pieces of one size but for the last one."""
    left = b""
    for path, at, nbytes in runs(whole):
        with open(path, "rb") as file:
            file.seek(at)
            for start, stop in pairwise([*range(0, nbytes, _PIECE), nbytes]):
                left += file.read(stop - start)
                while len(left) >= _PIECE:
                    yield left[:_PIECE]
                    left = left[_PIECE:]
    if left:
        yield left
