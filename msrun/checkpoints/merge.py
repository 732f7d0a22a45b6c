"""``msrun checkpoints merge``: the tensors of a checkpoint as one safetensors file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agent.spec.job_spec import UsageError
from agent.text.wording import sized
from msrun.checkpoints.catalog import (
    CheckpointItem,
    bytes_to_read,
    checkpoints,
    damages,
)
from msrun.terminal.progress import bar, counted, say
from msrun.terminal.stdout import put
from worker_hooks.contract.atomic_file import fsync_folder
from worker_hooks.storage import merged_file, safetensors_file
from worker_hooks.storage.manifest import Manifest, describe_dispute, files_by_group
from worker_hooks.storage.one_state import why_not_one
from worker_hooks.storage.safetensors_file import Header
from worker_hooks.storage.shard_file import OBJECTS, REST
from worker_hooks.storage.tensor_parts import JoinedTensor, joined

_EXTRA, _TRANSIENT = "extra", "transient"  # parts of a module that are no tensors in its state_dict


class MergeOrder(NamedTuple):
    """What the user wants."""

    output: Path | None  # None: named after the checkpoint, in the working folder
    only: str | None  # a registered object; the names in the file are then its own
    is_forced: bool  # replace an existing file


class _Source(NamedTuple):
    """What is merged."""

    item: CheckpointItem
    tensors: Mapping[str, JoinedTensor]
    metadata: Mapping[str, str]


def merge(folder: Path, items: Sequence[CheckpointItem], order: MergeOrder) -> bool:
    """Write the file; false: nothing was complete.

    ``items``: of several checkpoints it takes the newest that passes verification.

    Raises:
        UsageError: tensors are missing, there is no such object, the file exists, or it cannot be
            written.
    """
    chosen = _chosen(items)
    if chosen is None:
        say(f"nothing in {folder} is complete: no file was written")
        return False
    try:
        source = _source(chosen)
        names = _names(source, order.only)
        path = order.output or Path(_stem(folder, chosen[0], order.only) + ".safetensors")
        done = _write(path, source, names, order)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        where = error.filename or order.output or folder
        raise UsageError(f"{where}: {error.strerror or error}; no file was written") from error
    put(f"{path}: {counted(len(names), 'tensor')}, {sized(done)}\n")
    return True


def _chosen(items: Sequence[CheckpointItem]) -> list[CheckpointItem] | None:
    """The newest verified checkpoint, else all foreign files; ``None``: they are damaged."""
    found = [item for item, _ in checkpoints(items)]
    for item in found:
        with bar("verifying", bytes_to_read(item)) as advance:
            flaws = damages(item, advance)
        if not flaws:
            return [item]
        for flaw in flaws:
            say(f"{item.path} is damaged: {flaw}")
    files = [] if found else [item for item in items if isinstance(item.content, Header)]
    broken = [item for item in items if item.flaws and not found]
    for item in broken:
        say(f"{item.path} is damaged: {item.flaws[0]}")
    return files if files and not broken else None


def _source(chosen: Sequence[CheckpointItem]) -> _Source:
    """The tensors of the chosen items.

    Raises:
        OSError: a file cannot be read.
        ValueError: parts are missing or do not fit.
    """
    first = chosen[0]
    if not isinstance(first.content, Manifest):
        files = [(item.path, item.content) for item in chosen if isinstance(item.content, Header)]
        return _Source(first, joined(files, has_replicas=False), files[0][1].metadata)
    if first.content.is_disputed:
        raise ValueError(f"{first.path} cannot be merged: {describe_dispute(first.content)}")
    groups = files_by_group(first.path, first.content)
    if first.content.holders and (why := why_not_one(groups)):
        raise ValueError(
            f"{first.path} holds a state for each of {len(groups)} groups of ranks, which are no "
            f"parts of one: {why}; read their files one by one"
        )
    files = [each for group in groups for each in group]
    tensors = joined(files, has_replicas=True)
    headers = [header for _, header in files]
    return _Source(first, tensors, max(headers, key=_own).metadata if headers else {})


def _own(header: Header) -> int:
    """How many tensors the file's own metadata describe, which are those of its rank."""
    names = set(_texts(_json(header.metadata, OBJECTS)))
    return sum(entry.name in names for entry in header.entries)


def _json(metadata: Mapping[str, str], key: str) -> Any:
    try:
        return json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        return {}  # another program's metadata of that name


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value; names of tensors are among them."""
    match value:
        case str():
            yield value
        case list():
            for each in value:
                yield from _texts(each)
        case dict():
            for each in value.values():
                yield from _texts(each)


def _names(source: _Source, only: str | None) -> dict[str, str]:
    """Names in the file, each with the tensor's own.

    With ``only`` they are those of the module's ``state_dict``: without the object's prefix, and
    without tensors that are not in it.

    Raises:
        ValueError: the checkpoint has no such object.
    """
    if only is None:
        return {name: name for name in source.tensors}
    rest = _json(source.metadata, REST)
    pieces = rest.get("pieces", {}) if isinstance(rest, dict) else {}
    pieces = pieces if isinstance(pieces, dict) else {}
    found = {name.removeprefix(f"{only}."): name for name in source.tensors if _is_in(name, only)}
    if not found:
        known = sorted(pieces or {name.partition(".")[0] for name in source.tensors})
        raise ValueError(
            f"{source.item.path} has no {only}: it has {', '.join(known) or 'nothing'}"
        )
    left_out: set[str] = set()
    for name, value in pieces.items():
        if _is_in(name, only) and isinstance(value, dict):
            extra = value.get(_EXTRA) or {}
            if extra:
                say(f"the extra state of {name} is not written: load with strict=False")
            left_out |= {*_texts(extra), *_texts(value.get(_TRANSIENT))}
    return {new: old for new, old in found.items() if old not in left_out}


def _is_in(name: str, only: str) -> bool:
    return name == only or name.startswith(f"{only}.")


def _stem(folder: Path, first: CheckpointItem, only: str | None) -> str:
    """The default name of the file."""
    if isinstance(first.content, Manifest):
        stem = first.path.absolute().name
    else:
        stem = first.path.stem if folder.is_file() else folder.absolute().name
    return stem if only is None else f"{stem}-{only}"


def _check(path: Path, source: _Source, order: MergeOrder) -> None:
    """Refuse a path at which the file must not be written.

    Raises:
        ValueError: it says why.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file with --output")
    if not path.parent.is_dir():
        raise ValueError(f"the folder of {path} does not exist")
    inside = isinstance(source.item.content, Manifest) and source.item.path.resolve()
    if inside and path.resolve().is_relative_to(inside):
        raise ValueError(f"{path} is in the checkpoint itself: name another folder with --output")
    if os.path.lexists(path) and not order.is_forced:
        raise ValueError(f"{path} exists: --force replaces it, --output names another")


def _write(path: Path, source: _Source, names: Mapping[str, str], order: MergeOrder) -> int:
    """Write the file under a temporary name, then rename it; its size in bytes."""
    _check(path, source, order)
    wholes = merged_file.in_order({new: source.tensors[old] for new, old in names.items()})
    for entry in (whole.entry for whole in wholes):
        if (kept := safetensors_file.stored(entry)) != entry:
            say(f"safetensors has no {entry.dtype}: {entry.name} is written as {kept.dtype}")
    aside = path.parent / f".{path.name}.{os.getpid()}_tmp"
    told = _metadata(source, order.only)
    with bar("merging", sum(whole.entry.nbytes for whole in wholes)) as advance:
        done = merged_file.write(aside, wholes, told, advance)
    try:
        _check(path, source, order)  # again: the file may have appeared meanwhile
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    fsync_folder(path.parent)
    return done.nbytes


def _metadata(source: _Source, only: str | None) -> dict[str, str]:
    """The file's metadata; other state than tensors is only in a file with all objects."""
    kept = {} if only is not None and REST in source.metadata else source.metadata
    manifest = source.item.content
    return merged_file.metadata(kept, manifest if isinstance(manifest, Manifest) else None)
