"""Finds what a folder holds: msrun's checkpoints, unfinished ones and remains, and foreign files.

Only names, sizes, manifests and headers are read here.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from agent.spec.job_spec import UsageError
from worker_hooks.contract.atomic_file import read_small
from worker_hooks.contract.layout import DUMP, REMOVED, UNFINISHED
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage import merged_file, retention
from worker_hooks.storage.find import candidates
from worker_hooks.storage.manifest import CHECKPOINT_KIND, DUMP_KIND, Manifest
from worker_hooks.storage.safetensors_file import Header, read_header

FOREIGN = "foreign"  # a safetensors file that no manifest names
LEFTOVER = "leftover"  # remains of an interrupted deletion
SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
_DIGITS = 19  # msrun writes no number with so many
_DEPTH = 3  # levels of folders that are searched for foreign files


class CheckpointItem(NamedTuple):
    """A checkpoint folder, a foreign file, or the remains of a folder.

    Without ``content`` it is unfinished, or too damaged to be read.
    """

    path: Path
    kind: str  # a manifest's, FOREIGN or LEFTOVER
    nbytes: int
    saved_at: float  # seconds since the epoch
    content: Manifest | Header | None = None
    flaws: tuple[str, ...] = ()  # damage that is visible without reading tensors

    @property
    def is_complete(self) -> bool:
        """Whether it is complete, judged by sizes and headers."""
        return self.content is not None and not self.flaws


def look(folder: Path, *, below: bool = False) -> list[CheckpointItem]:
    """All items: checkpoints, the newest step first, then foreign files by name.

    Args:
        folder: a folder with checkpoints, a checkpoint itself, or a single file.
        below: if it holds no checkpoint itself, take those of the folders in it.

    Raises:
        UsageError: there are no items.
    """
    if folder.is_file():
        return [_file(folder)]
    if not folder.is_dir():
        what = "is neither a file nor a folder" if os.path.lexists(folder) else "does not exist"
        raise UsageError(f"{folder} {what}")
    if folder.name.endswith(REMOVED):
        return [_leftover(folder)]
    known = candidates(folder) or (candidates(*_folders(folder)) if below else [])
    items = [_checkpoint(path, found) for path, found in known]
    with contextlib.suppress(OSError):  # an unreadable folder is an item already
        items += map(_leftover, retention.leftovers(folder))
    claimed = {os.path.realpath(item.path) for item in items}
    items += map(_file, _foreign(folder, claimed, SUFFIX))
    items += (item for path in _foreign(folder, claimed, INDEX) if (item := _index(path)).flaws)
    if not items:
        raise UsageError(f"{folder} holds no checkpoint and no safetensors file")
    return items


def checkpoints(items: Collection[CheckpointItem]) -> list[tuple[CheckpointItem, Manifest]]:
    """The items that have a manifest, with it."""
    return [(item, item.content) for item in items if isinstance(item.content, Manifest)]


def damages(item: CheckpointItem, advance: Callable[[int], None]) -> list[str]:
    """All damage of an item; every file that has a checksum is read to its end.

    ``advance`` is called with numbers of bytes read, from several threads.
    """
    if isinstance(item.content, Manifest):
        return manifests.verify(item.path, item.content, advance)
    return list(item.flaws)


def damages_for_readers(item: CheckpointItem, advance: Callable[[int], None]) -> list[str]:
    """The same, and that of a merged file, which msrun itself never reads."""
    found = damages(item, advance)
    if found or not isinstance(item.content, Manifest):
        return found
    return list(merged_file.flaws(item.path, item.content, advance))


def bytes_to_read(item: CheckpointItem) -> int:
    """How many bytes :func:`damages` reads."""
    if isinstance(item.content, Manifest):
        return sum(shard.nbytes for shard in item.content.shards)
    return 0


def bytes_for_readers(item: CheckpointItem) -> int:
    """How many bytes :func:`damages_for_readers` compares."""
    found = bytes_to_read(item)
    if isinstance(item.content, Manifest) and item.content.holders:
        for path in merged_file.present(item.path):
            with contextlib.suppress(OSError):  # training deletes meanwhile
                found += path.stat().st_size
    return found


def fact(item: CheckpointItem, name: str) -> int | None:
    """``step``, ``epoch``, ``batch`` or ``world_size`` from the manifest or the header."""
    match item.content:
        case Manifest():
            return int(getattr(item.content, name))
        case Header():
            text = item.content.metadata.get(name, "")
            return int(text) if text.isascii() and text.isdigit() and len(text) < _DIGITS else None
    return None


def _checkpoint(path: Path, found: Manifest | str) -> CheckpointItem:
    if isinstance(found, Manifest):
        flaws = tuple(manifests.verify(path, found, quick=True))
        return CheckpointItem(path, found.kind, _nbytes(path), found.saved_at, found, flaws)
    kind = DUMP_KIND if path.name.startswith(DUMP) else CHECKPOINT_KIND
    flaws = () if path.name.endswith(UNFINISHED) else (found,)
    return CheckpointItem(path, kind, _nbytes(path), _changed(path), flaws=flaws)


def _leftover(path: Path) -> CheckpointItem:
    return CheckpointItem(path, LEFTOVER, _nbytes(path), _changed(path))


def _file(path: Path) -> CheckpointItem:
    try:
        state = path.stat()
        header = read_header(path)
    except ValueError as error:
        why = str(error).removeprefix(f"{path} ")
        return CheckpointItem(path, FOREIGN, state.st_size, state.st_mtime, flaws=(why,))
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        return CheckpointItem(path, FOREIGN, nbytes=0, saved_at=0.0, flaws=(why,))
    return CheckpointItem(path, FOREIGN, state.st_size, state.st_mtime, header)


def _index(path: Path) -> CheckpointItem:
    """Hugging Face's list of a model's files; it is damaged if one of them is missing."""
    flaws: tuple[str, ...] = ()
    try:
        named = set(json.loads(read_small(path))["weight_map"].values())
        missing = sorted(name for name in named if not (path.parent / name).is_file())
        flaws = tuple(f"it names {name}, which is missing" for name in missing)
    except OSError as error:
        flaws = (f"cannot be read ({error.strerror})",)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        flaws = ("is not a list of a model's files",)
    return CheckpointItem(path, FOREIGN, nbytes=0, saved_at=_changed(path), flaws=flaws)


def _folders(folder: Path) -> Iterator[Path]:
    """Folders in a project's folder that may hold checkpoints; hidden ones are left out."""
    for place, folders, _ in os.walk(folder):
        here = Path(place)
        if len(here.parts) - len(folder.parts) >= _DEPTH - 1:
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (here / name for name in folders)


def _foreign(folder: Path, claimed: Collection[str], suffix: str) -> list[Path]:
    """Files outside of checkpoints; a file with several names appears once."""
    found: dict[str, Path] = {}
    for path in sorted(_files(folder, claimed, suffix)):
        real = os.path.realpath(path)
        if real not in found or found[real].is_symlink():
            found[real] = path
    return sorted(found.values())


def _files(folder: Path, claimed: Collection[str], suffix: str) -> Iterator[Path]:
    top = len(folder.parts)
    if os.path.realpath(folder) in claimed:
        return
    for place, folders, files in os.walk(folder):
        here = Path(place)
        is_deepest = len(here.parts) - top >= _DEPTH
        inside = [name for name in folders if os.path.realpath(here / name) not in claimed]
        folders[:] = [] if is_deepest else inside
        paths = (here / name for name in files if name.endswith(suffix))
        yield from (path for path in paths if path.is_file())


def _nbytes(folder: Path) -> int:
    """The size of all files in it, without following links."""
    found = (os.path.join(place, name) for place, _, files in os.walk(folder) for name in files)
    total = 0
    for path in found:
        with contextlib.suppress(OSError):  # training is writing or deleting it
            total += os.lstat(path).st_size
    return total


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
