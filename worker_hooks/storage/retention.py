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

from worker_hooks.contract.atomic_file import UNABLE, fsync_folder
from worker_hooks.contract.layout import BREAKPOINT, MANIFEST, NUMBERED, REMOVED, UNFINISHED
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


def of_lineage(
    found: Sequence[tuple[Path, Manifest]], runs: Sequence[str], until: int
) -> list[tuple[Path, Manifest]]:
    """Those that this run or its past saved. Pure.

    Args:
        runs: record ids of this run, and of those that it resumed.
        until: the step that this run began from. What those saved of later steps is another
            course of training, to which somebody may want to return.
    """
    return [
        (path, one)
        for path, one in found
        if one.record_id == runs[0] or (one.record_id in runs and one.step <= until)
    ]


def is_of(path: Path, prefix: str) -> bool:
    """Whether the name is that of a complete periodic checkpoint of the prefix."""
    name = rf"{re.escape(prefix)}-\d+_\d+(?:{BREAKPOINT})?(?:{NUMBERED})?"
    return re.fullmatch(name, path.name) is not None


def chosen(
    found: Sequence[tuple[Path, Manifest]],
    keep_max: int,
    per_minutes: int,
    spared: Collection[Path] = (),
    lineage: Sequence[str] = (),
    last: Path | None = None,
) -> list[Path]:
    """The checkpoints that a rule deletes, the oldest first. Pure.

    Args:
        keep_max: how many of the newest stay; 0: no such rule.
        per_minutes: one stays for each interval of this length, and the newest; used only if
            ``keep_max`` is 0. 0: no such rule. Without any rule nothing is deleted.
        spared: they stay in any case, and count like the others.
        lineage: record ids of runs that resumed each other, the newest first.
        last: it was just saved, and stays.
    """
    ordered = oldest_first(found, lineage, last)
    paths = [path for path, _ in ordered]
    if keep_max > 0:
        going = paths[:-keep_max]
    elif per_minutes > 0:
        marks = _marks(ordered, per_minutes * _MINUTE_S)
        going = [path for path in paths[:-1] if path not in marks]
    else:
        going = []
    return [path for path in going if path not in spared and path != last]


def oldest_first(
    found: Sequence[tuple[Path, Manifest]],
    lineage: Sequence[str] = (),
    last: Path | None = None,
) -> list[tuple[Path, Manifest]]:
    """Checkpoints in the order in which they were saved, whatever the clock said. Pure.

    A run comes after the run that it resumed, and in a run the step tells the order. Only among
    runs of no known lineage, and for the same step again, the time of saving does.

    Args:
        lineage: record ids of runs that resumed each other, the newest first.
        last: it was just saved; what its run saved of later steps was given up.
    """
    reached = {one.record_id: one.step for path, one in found if path == last}
    begun: dict[str, float] = {}
    for _, one in found:
        begun[one.record_id] = max(one.saved_at, begun.get(one.record_id, 0.0))

    def age(found: tuple[Path, Manifest]) -> tuple[int, float, bool, int, float, str]:
        path, one = found
        run = one.record_id
        generation = -lineage.index(run) if run in lineage else -len(lineage)
        among = 0.0 if run in lineage else begun[run]
        is_valid = one.step <= reached.get(run, one.step)
        return generation, among, is_valid, one.step, one.saved_at, str(path)

    return sorted(found, key=age)


def _marks(oldest_first: Sequence[tuple[Path, Manifest]], apart_s: int) -> set[Path]:
    """The first one, and each that was saved at least ``apart_s`` after the previous mark."""
    marks: set[Path] = set()
    mark_s = -float(apart_s)
    for path, manifest in oldest_first:
        if not mark_s <= manifest.saved_at < mark_s + apart_s:  # earlier: the clock was set back
            marks.add(path)
            mark_s = manifest.saved_at
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
    except OSError as error:
        if error.errno not in UNABLE:
            raise
        _delete(path)  # without its manifest, which goes first, nobody trusts it
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
