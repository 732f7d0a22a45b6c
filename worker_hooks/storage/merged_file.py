"""The tensors of several files as one safetensors file, written as a stream.

It reads and writes in pieces, so that even the largest state needs little memory. Standard library
only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from worker_hooks.contract.atomic_file import fsync_folder
from worker_hooks.storage import safetensors_file
from worker_hooks.storage.manifest import Manifest, files_by_group
from worker_hooks.storage.one_state import why_not_one
from worker_hooks.storage.safetensors_file import BITS, WrittenFile
from worker_hooks.storage.shard_file import OBJECTS, REST, SHARDING
from worker_hooks.storage.tensor_parts import JoinedTensor, joined, pieces, runs

_PIECE = 4 << 20  # bytes
_BUFFERS = 32 << 20  # bytes, of all files that are read side by side
_LEAST_BUFFER = 64 << 10
_FACTS = ("kind", "step", "epoch", "batch", "world_size", "record_id", "digest")


def add_to(folder: Path, manifest: Manifest, advance: Callable[[int], None]) -> str:
    """Put one file with the state of all groups into a complete checkpoint, in place of its links.

    No manifest names it: it can be made again, and :func:`flaws` compares it with what it is of.

    Args:
        advance: called with the number of bytes that reached the disk since the last call; may
            raise to give up.

    Returns:
        Why there is none, as text; empty: there is.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: a tensor was cut within a byte.
    """
    groups = files_by_group(folder, manifest)
    if why := why_not_one(groups):
        return why
    files = [each for group in groups for each in group]
    path = folder / f"{folder.name}.safetensors"
    aside = folder / f".{path.name}_tmp"
    told = metadata(files[0][1].metadata, manifest)
    write(aside, in_order(joined(files, has_replicas=True)), told, advance)
    for link in folder.glob("*.safetensors"):
        if link.is_symlink():  # who reads all files would read everything twice
            link.unlink()
    os.replace(aside, path)
    fsync_folder(folder)
    return ""


def present(folder: Path) -> list[Path]:
    """The merged file of a checkpoint, and whatever else torch's reader would take for one."""
    return [path for path in sorted(folder.glob("*.safetensors")) if not path.is_symlink()]


def flaws(folder: Path, manifest: Manifest, advance: Callable[[int], None]) -> Iterator[str]:
    """What is wrong with these: they do not hold what the groups have written, bit by bit.

    Args:
        manifest: of a checkpoint that is verified.
        advance: called with the number of bytes compared since the last call.
    """
    for path in present(folder) if manifest.holders else ():
        try:
            files = [each for group in files_by_group(folder, manifest) for each in group]
            why = _difference(path, in_order(joined(files, has_replicas=True)), advance)
        except (OSError, ValueError) as error:
            why = f"cannot be compared: {error}"
        if why:
            yield f"{path.name} {why}"


def _difference(path: Path, wholes: Sequence[JoinedTensor], advance: Callable[[int], None]) -> str:
    head = safetensors_file.read_header(path)
    if list(head.entries) != [whole.entry for whole in wholes]:
        return "has other tensors than the ranks' files"
    with open(path, "rb") as file:
        file.seek(head.data_offset)
        for whole in wholes:
            for piece in _pieces(whole):
                if file.read(len(piece)) != piece:
                    return f"was altered: {whole.entry.name} is not that of the ranks' files"
                advance(len(piece))
    return ""


def metadata(of_part: Mapping[str, str], manifest: Manifest | None) -> dict[str, str]:
    """The metadata of the merged file. ``manifest``: the checkpoint's, if it has one."""
    left_out = {SHARDING, "DCP_VERSION"}  # the file holds no parts any more
    facts = {}
    if manifest is not None:
        facts = {name: str(getattr(manifest, name)) for name in _FACTS}
        if manifest.holders:  # they say which part of the state was their group's
            left_out |= {REST, OBJECTS}
    kept = {name: text for name, text in of_part.items() if name not in left_out}
    return kept | facts | {"format": "pt"}


def in_order(tensors: Mapping[str, JoinedTensor]) -> list[JoinedTensor]:
    """The tensors under these names, so that all are aligned."""
    found = sorted(tensors.items(), key=lambda each: (-BITS[each[1].entry.dtype], each[0]))
    return [whole._replace(entry=whole.entry._replace(name=name)) for name, whole in found]


def write(
    path: Path,
    wholes: Sequence[JoinedTensor],
    told: Mapping[str, str],
    advance: Callable[[int], None],
) -> WrittenFile:
    """Write the file.

    Args:
        path: in a folder that exists; who completes the folder also syncs it.
        wholes: of :func:`in_order`.
        advance: called with the number of bytes that reached the disk since the last call; may
            raise to give up.

    Raises:
        OSError: a file could not be read or written; nothing is left at ``path``.
        ValueError: one has become shorter, or two tensors have one name; likewise.
    """
    head = safetensors_file.header([whole.entry for whole in wholes], told)
    return safetensors_file.write(path, head, (x for one in wholes for x in _pieces(one)), advance)


def _pieces(whole: JoinedTensor) -> Iterator[bytes]:
    # the runs of a part follow each other in its file, and may be shorter than a read is worth
    room = max(_LEAST_BUFFER, min(_PIECE, _BUFFERS // len(whole.parts)))
    return pieces(runs(whole), _PIECE, room)
