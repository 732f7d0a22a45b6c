"""Whether the files of several replica groups make up one state, which anybody may read.

Their parts of distributed tensors do, unless a part is missing. But a tensor may have one name in
all groups and another content in each, as the layers of a pipeline have. Nobody says which: it is
seen. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from worker_hooks.contract.status_page import Entry
from worker_hooks.storage.safetensors_file import Header
from worker_hooks.storage.tensor_parts import (
    JoinedTensor,
    Run,
    is_distributed,
    joined,
    nbytes_of,
    overlaps,
    pieces,
    places_in,
    runs,
)

_PIECE = 1 << 20  # bytes, read at once

Files = Sequence[tuple[Path, Header]]


class IncompleteStateError(ValueError):
    """Parts of the state are missing; the message names a tensor or ranks."""


def check_complete(groups: Sequence[Files], holders: Sequence[Sequence[int]] = ()) -> None:
    """Prove that nothing is missing, and that what is there fits.

    Args:
        groups: the files of each replica group, with their headers.
        holders: the ranks of each group; none: there is one, of all ranks.

    Raises:
        IncompleteStateError: something is missing, or does not fit.
    """
    for ranks, files in zip(holders, groups, strict=False):
        if not files:
            listed = ", ".join(map(str, ranks))
            raise IncompleteStateError(f"no file has the state of rank {listed}")
    try:
        _distributed(groups)
        for files in groups:
            _undistributed(files)
    except ValueError as error:
        raise IncompleteStateError(str(error)) from None


def why_not_one(groups: Sequence[Files], most: int | None = None) -> str:
    """Why the files of these groups are no parts of one state, as text; empty: they are.

    Args:
        groups: the files of each replica group, with their headers.
        most: bytes that may be compared; more count as different.

    Raises:
        OSError: a file cannot be read.
        ValueError: parts of a tensor are missing, or do not fit each other.
    """
    cut, wholes = _distributed(groups), [_undistributed(files) for files in groups]
    seen: dict[str, JoinedTensor] = {}
    pairs: list[tuple[JoinedTensor, JoinedTensor]] = []
    for group in wholes:
        for name, whole in group.items():
            first = seen.setdefault(name, whole)
            if first is not whole:
                pairs.append((first, whole))
            if first.entry != whole.entry or name in cut:
                return _differs(name)
    shared = list(overlaps([each for files in groups for each in files]))
    nbytes = sum(whole.entry.nbytes for _, whole in pairs)
    nbytes += sum(nbytes_of(other, block) for _, other, block in shared)
    if most is not None and nbytes > most:
        return "what several groups of ranks hold is too large to be compared"
    for first, whole in pairs:
        if not _are_equal(runs(first), runs(whole)):
            return _differs(first.entry.name)
    for one, other, block in shared:
        if not _are_equal(runs(one, block), runs(other, block)):
            return _differs(one.entry.name)
    return ""


def tensors_by_groups(groups: Sequence[Files]) -> list[tuple[JoinedTensor, int]]:
    """The tensors of several groups, and from how many groups each comes.

    What is not distributed counts as the same where it looks alike; nobody reads its content.

    Raises:
        ValueError: parts of a tensor are missing, or do not fit each other.
    """
    found = list[tuple[JoinedTensor, int]]()
    for whole in _distributed(groups).values():
        paths = {part.path for part in whole.parts}
        found.append((whole, sum(any(path in paths for path, _ in files) for files in groups)))
    alike: dict[Entry, list[JoinedTensor]] = {}
    for files in groups:
        for whole in _undistributed(files).values():
            alike.setdefault(whole.entry, []).append(whole)
    return found + [(wholes[0], len(wholes)) for wholes in alike.values()]


def _differs(name: str) -> str:
    return f"{name} is not the same in all groups of ranks"


def _distributed(groups: Sequence[Files]) -> Mapping[str, JoinedTensor]:
    """The tensors of which other groups may have other parts."""
    files = [each for group in groups for each in group]
    return joined(files, has_replicas=True, others={path for path, _ in files})


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


def _are_equal(one: Iterable[Run], other: Iterable[Run]) -> bool:
    pairs = zip(pieces(one, _PIECE, _PIECE), pieces(other, _PIECE, _PIECE), strict=True)
    return all(mine == theirs for mine, theirs in pairs)
