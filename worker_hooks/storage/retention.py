"""Which old checkpoints are deleted, and how: at each moment one is complete or not trusted.

Standard library only: training prunes its own checkpoints, ``msrun checkpoints prune`` does it on
demand.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from worker_hooks.contract.atomic_file import fsync_folder
from worker_hooks.contract.layout import BREAKPOINT, MANIFEST, REMOVED, REPLACED, UNFINISHED
from worker_hooks.storage.manifest import Manifest, read

_MINUTE_S = 60


def present(directory: Path, prefix: str | None = None) -> list[tuple[Path, Manifest]]:
    """The complete checkpoints of a directory, in no order; only their manifests are read.

    Links are left out: their targets may belong to another directory.

    Args:
        directory: one that does not exist holds none.
        prefix: only periodic checkpoints of this prefix, of any run; by default everything that
            has a manifest, including dumps.

    Raises:
        OSError: the directory cannot be read.
    """
    found = []
    try:
        paths = sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    for path in paths:
        is_meant = prefix is None or is_of(path, prefix)
        if is_meant and not path.name.endswith(UNFINISHED) and not path.is_symlink():
            with contextlib.suppress(ValueError):
                found.append((path, read(path)))
    return found


def is_of(path: Path, prefix: str) -> bool:
    """Whether the name is that of a complete periodic checkpoint of the prefix."""
    name = rf"{re.escape(prefix)}-\d+_\d+(?:{BREAKPOINT})?(?:{REPLACED}\d+)?"
    return re.fullmatch(name, path.name) is not None


def chosen(
    found: Sequence[tuple[Path, Manifest]],
    keep_max: int,
    per_minutes: int,
    spared: Collection[Path] = (),
) -> list[Path]:
    """The checkpoints that a rule deletes, the oldest first. Pure.

    The age is the time of saving, not the step: a new run in a folder with higher steps of an
    earlier run must not lose what it has just saved.

    Args:
        found: complete checkpoints.
        keep_max: how many of the newest stay; 0: no such rule.
        per_minutes: one stays for each interval of this length, and the newest; used only if
            ``keep_max`` is 0. 0: no such rule. Without any rule nothing is deleted.
        spared: they stay in any case, and count like the others.
    """
    oldest_first = [path for path, _ in sorted(found, key=_age)]
    if keep_max > 0:
        going = oldest_first[:-keep_max]
    elif per_minutes > 0:
        marks = _marks(sorted(found, key=_age), per_minutes * _MINUTE_S)
        going = [path for path in oldest_first[:-1] if path not in marks]
    else:
        going = []
    return [path for path in going if path not in spared]


def _age(one: tuple[Path, Manifest]) -> tuple[float, int, str]:
    path, manifest = one
    return manifest.saved_at, manifest.step, str(path)


def _marks(oldest_first: Sequence[tuple[Path, Manifest]], apart_s: int) -> set[Path]:
    """The first one, and each that was saved at least ``apart_s`` after the previous mark."""
    marks: set[Path] = set()
    due_s = 0.0
    for path, manifest in oldest_first:
        if manifest.saved_at >= due_s:
            marks.add(path)
            due_s = manifest.saved_at + apart_s
    return marks


def remove(path: Path) -> None:
    """Delete a checkpoint so that a crash leaves it complete, or under a name of no checkpoint.

    It is no error if it is gone already or if another process is deleting it.

    Raises:
        OSError: it is unchanged, or it is no checkpoint any more but not all of it is deleted;
            :func:`sweep` tries again.
    """
    aside = path.with_name(f"{path.name}{REMOVED}")
    _delete(aside)  # what a crash left: the rename needs a free name
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    fsync_folder(path.parent)  # a power cut could bring the name back, but not the files
    _delete(aside)


def leftovers(directory: Path) -> list[Path]:
    """What interrupted deletions have left behind.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        return sorted(path for path in directory.iterdir() if path.name.endswith(REMOVED))
    except FileNotFoundError:
        return []


def sweep(directory: Path) -> list[Path]:
    """Finish interrupted deletions; return what there was.

    Raises:
        OSError: something cannot be deleted.
    """
    left = leftovers(directory)
    for path in left:
        _delete(path)
    return left


def _delete(path: Path) -> None:
    """Delete a renamed folder, its manifest first; other processes may do the same now."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path / MANIFEST)
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)  # raises the reason, if something is left
