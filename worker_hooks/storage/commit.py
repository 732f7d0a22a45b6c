"""Completes a dump: every rank's private state, the manifest, and the rename that commits it.

Used by the agent, and by workers whose agent is dead; so it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from worker_hooks.contract.atomic_file import FOLDER_MODE, UNABLE, fsync_folder, tell_once
from worker_hooks.contract.layout import BESIDE, MANIFEST, REPLACED, DumpLayout
from worker_hooks.contract.status_page import CommitRecord, Entry
from worker_hooks.storage import group_info, safetensors_file
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import PRIVATE, REPLICATED, Manifest, Shard
from worker_hooks.storage.one_state import Files, why_not_one
from worker_hooks.storage.tensor_parts import parts_in

MOST_COMPARED = 256 << 20  # bytes, while the job waits

EARLY_BUFFERS = "has_early_buffers"
"""Says in the file of a rank's private state that the buffers alone are from before the commit."""


def make_folder(layout: DumpLayout) -> None:
    """Make the unfinished folder; what an interrupted dump left there is removed.

    Raises:
        OSError: the place cannot be written to.
    """
    folder = layout.unfinished
    make_durable(folder.parent)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(FOLDER_MODE)


def make_durable(folder: Path) -> None:
    """Make a folder and its parents so that they survive a power cut."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_durable(folder.parent)
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    fsync_folder(folder.parent)


def write_private(
    folder: Path,
    rank: int,
    entries: Sequence[Entry],
    record: CommitRecord,
    advance: Callable[[int], None],
) -> Shard:
    """Write a rank's private state: the unchanged payload of its page.

    Raises:
        OSError: it cannot be written.
    """
    file = DumpLayout.private(rank)
    (folder / file).parent.mkdir(FOLDER_MODE, exist_ok=True)
    head = private_head(entries, record)
    done = safetensors_file.write(folder / file, head, [record.payload], advance)
    return Shard(file, rank, PRIVATE, done.nbytes, done.sha256)


def private_head(entries: Sequence[Entry], record: CommitRecord) -> bytes:
    """The bytes before the payload in the file of a rank's private state.

    Raises:
        ValueError, TypeError, KeyError: the page describes itself wrongly.
    """
    metadata = {
        "record": record.meta.decode(),
        "step": str(record.step),
        "epoch": str(record.epoch),
        "batch": str(record.batch),
        "is_commit": str(int(record.is_commit)),
    }
    if record.has_early_buffers:
        metadata[EARLY_BUFFERS] = "1"
    return safetensors_file.header(entries, metadata)


def complete(
    layout: DumpLayout, manifest: Manifest, lineage: Collection[str] = ()
) -> tuple[Path, bool]:
    """As :func:`commit`; also whether another part of the job had saved the step already.

    Parts of a job that are cut from each other may save the same step under one name. What others
    have saved, and may be reading, stays as it is if it has no less.
    """
    if _holds_all_of(layout.folder, manifest):
        shutil.rmtree(layout.unfinished, ignore_errors=True)
        return layout.folder, True
    return commit(layout, manifest, lineage), False


def _holds_all_of(folder: Path, about: Manifest) -> bool:
    """Whether a checkpoint is there already that has all of this step, and of at least these ranks.

    One of an earlier attempt gives way: this one may begin where that could not be read.
    """
    try:
        there = manifests.read(folder)
    except ValueError:
        return False
    lacking, lacks = ({*one.without_private, *one.stale_private} for one in (there, about))
    return (
        (there.record_id, there.step) == (about.record_id, about.step)
        and there.attempt >= about.attempt
        and ("" in (there.digest, about.digest) or there.digest == about.digest)  # from memory
        and there.holders == about.holders
        and not there.is_disputed
        and lacking <= lacks
        and not manifests.verify(folder, there, quick=True)
    )


def commit(layout: DumpLayout, manifest: Manifest, lineage: Collection[str] = ()) -> Path:
    """Make an unfinished folder complete, with its manifest, under its final name: its path.

    Files that the manifest does not name are removed; each rank of replica groups gets a
    ``group_info.pb``. An existing folder of the final name is
    renamed, not deleted. If another run saved that, which may resume from it, it stays as it is,
    and the new folder gets a number. ``lineage``: record ids of the runs that this one resumed.

    Raises:
        OSError: nothing was completed.
        IncompleteStateError: parts of the state are missing.
    """
    folder = layout.unfinished
    manifests.check_whole(folder, manifest)
    _remove_others(folder, {shard.file for shard in manifest.shards})
    if not manifest.is_disputed:
        group_info.write_all(folder, manifest.holders)
    for name, file in _links(folder, manifest):
        # torch's reader of safetensors folders looks at one level only
        with contextlib.suppress(OSError):  # not every file system has links; we need none
            (folder / name).symlink_to(file)
    for path in {(folder / shard.file).parent for shard in manifest.shards}:
        fsync_folder(path)
    manifests.write(folder, manifest)  # which also makes the folder's other names durable
    final, aside = layout.folder, None
    if final.exists():
        if _owner(final) in {None, manifest.record_id, *lineage}:
            aside = _free(final, REPLACED)
            move(final, aside)
        else:
            final = _free(final, BESIDE)
    try:
        move(folder, final)
    except OSError:
        if aside is not None:
            move(aside, final)  # it may be what the job would resume from
        raise
    fsync_folder(final.parent)
    return final


def move(source: Path, target: Path) -> None:
    """Rename a folder; where that is impossible, move its files, the manifest last.

    Raises:
        OSError: it cannot be moved; there may be a part of it at the target, without a manifest.
    """
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno not in UNABLE:
            raise
    else:
        return
    tell_once(target.parent, "rename folders: files are moved one by one, which is slower")
    inside = sorted(source.rglob("*"), key=lambda path: (path == source / MANIFEST, path))
    target.mkdir(FOLDER_MODE, exist_ok=True)
    for path in inside:
        there = target / path.relative_to(source)
        if path.is_dir() and not path.is_symlink():
            there.mkdir(FOLDER_MODE, exist_ok=True)
        else:
            os.replace(path, there)
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        fsync_folder(folder)
    shutil.rmtree(source)


def _owner(folder: Path) -> str | None:
    """The run that saved a checkpoint; ``None``: it is none that can be read."""
    try:
        return manifests.read(folder).record_id
    except ValueError:
        return None


def _links(folder: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Links to the files of the state that training resumes from: their names and targets."""
    if manifest.holders and not _is_one(folder, manifest):
        return  # who reads all files would mix states
    meant = [one for one in manifest.shards if one.kind == REPLICATED]
    meant = [one for one in meant if manifest.holders or one.variant == 0]
    count = Counter(Path(shard.file).name for shard in meant)
    for shard in meant:
        name = Path(shard.file).name
        yield (name if count[name] == 1 else shard.file.replace("/", "_")), shard.file


def _is_one(folder: Path, manifest: Manifest) -> bool:
    """Whether torch reads the files of several groups as one state."""
    if manifest.is_disputed:
        return False
    try:
        groups = manifests.files_by_group(folder, manifest)
        return not why_not_one(groups, MOST_COMPARED) and _has_one_part_a_place(groups)
    except ValueError:  # elements of half a byte, cut within one
        return False


def _has_one_part_a_place(groups: Sequence[Files]) -> bool:
    """Whether parts that begin at the same place are equally large: torch knows them by that."""
    shapes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    return all(
        shapes.setdefault((name, part.offsets), part.shape) == part.shape
        for files in groups
        for name, part in parts_in(files)
    )


def _remove_others(folder: Path, named: Collection[str]) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        name = str(path.relative_to(folder))
        # a writer that was given up may still write here; nobody reads its files
        with contextlib.suppress(OSError):
            if path.is_symlink() or (path.is_file() and name not in named and name != MANIFEST):
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _free(folder: Path, mark: str) -> Path:
    number = 1
    while (free := folder.with_name(f"{folder.name}{mark}{number}")).exists():
        number += 1
    return free
