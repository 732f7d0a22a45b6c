"""Finds checkpoints in folders: all that are there, and the newest that can be trusted."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from worker_hooks.contract.layout import BREAKPOINT, DUMP, MANIFEST, NUMBERED, REMOVED, UNFINISHED
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import Manifest

_NAME = re.compile(rf"{DUMP}(\d+)(?:{NUMBERED}|\.[^/]+(?={UNFINISHED}))?({UNFINISHED})?")
_UNFINISHED = re.compile(rf".+-\d+_\d+(?:{BREAKPOINT})?(?:\.[^/]+)?{UNFINISHED}")  # not a dump
_SHOWN = 3  # damages of one folder that a remark names

_IS_UNFINISHED = "it is unfinished"

Candidate = tuple[Path, Manifest | str]
"""A folder with its manifest, or with what is wrong with it."""


class Verify(Enum):
    """How closely a checkpoint is looked at before it is trusted."""

    FULL = "every byte against its checksum"
    QUICK = "existence and size of every file"
    NONE = "its manifest only"


class FoundCheckpoint(NamedTuple):
    """A complete checkpoint."""

    path: Path
    manifest: Manifest


class SearchResult(NamedTuple):
    """The answer to a search."""

    newest: FoundCheckpoint | None
    remarks: tuple[str, ...]  # a sentence about each checkpoint that cannot be trusted
    has_damaged: bool  # one of those is more than unfinished
    foreign: tuple[FoundCheckpoint, ...]  # other runs saved them, at this step or a later one


def search(
    folders: Iterable[Path],
    *,
    verify: Verify = Verify.FULL,
    runs: Collection[str] | None = None,
    above: int = -1,
    until: int | None = None,
) -> SearchResult:
    """Find the newest checkpoint that can be trusted.

    Args:
        folders: they hold checkpoints, or are checkpoints.
        verify: what it takes to be trusted.
        runs: record ids; ``None``: whichever run saved it.
        above: a step; those at it or before it are left out.
        until: a step; those after it are left out.
    """
    newest, remarks, has_damaged = None, [], False
    latest = float("inf") if until is None else until
    foreign: list[FoundCheckpoint] = []
    for path, found in candidates(*folders):
        if isinstance(found, Manifest) and not above < found.step <= latest:
            continue
        if isinstance(found, str):
            remarks.append(f"{path} is skipped: {found}")
            has_damaged |= found != _IS_UNFINISHED
        elif runs is not None and found.record_id not in runs:
            foreign.append(FoundCheckpoint(path, found))
        elif found.is_disputed:  # an older one would silently undo what somebody must decide
            remarks.append(f"{path} is not resumed from: {manifests.describe_dispute(found)}")
            has_damaged = True
            break
        else:
            sound, remark = _sound_part(path, found, verify)
            remarks += filter(None, (remark,))
            if sound is not None:
                newest = FoundCheckpoint(path, sound)
                break
            has_damaged = True
    return SearchResult(newest, tuple(remarks), has_damaged, tuple(foreign))


def search_of_run(
    folders: Iterable[Path],
    lineage: Sequence[str],
    until: int | None,
    *,
    verify: Verify = Verify.FULL,
) -> SearchResult:
    """Find the newest checkpoint that a run has saved, else what it began from.

    Other runs may save into the same folders: another script, or the same with other arguments.

    Args:
        lineage: record ids: the run, then those that it resumed, the newest first.
        until: the step that it resumed from; what runs before it saved later is not its own.
        verify: what it takes to be trusted.
    """
    places = tuple(folders)
    found = search(places, runs=lineage[:1], verify=verify)
    if found.newest is not None or not lineage[1:]:
        return found
    return search(places, runs=lineage, until=until, verify=verify)


def _sound_part(path: Path, manifest: Manifest, verify: Verify) -> tuple[Manifest | None, str]:
    """The manifest of what is sound in a checkpoint, if that is enough; and a remark."""
    if verify is Verify.NONE:
        return manifest, ""
    damages = manifests.verify(path, manifest, quick=verify is Verify.QUICK)
    if not damages:
        return manifest, ""
    more = f" and {len(damages) - _SHOWN} more" if len(damages) > _SHOWN else ""
    said = "; ".join(damages[:_SHOWN]) + more
    if verify is Verify.FULL:  # a quick look is no reason to trust the rest of a damaged one
        model = manifests.sound_model(path, manifest)
        if model is not None:
            return model, f"{path} is whole without damaged files that others equal: {said}"
    return None, f"{path} is skipped: {said}"


def candidates(*folders: Path) -> list[Candidate]:
    """Checkpoints in some folders, the newest step first; a folder may be a checkpoint itself.

    Dumps by their names, and whatever else has a manifest or is unfinished. None is verified. One
    that is not complete or not ours comes with the damage, in the place that its name or manifest
    gives it. A folder that is not there holds none.
    """
    found = {os.path.realpath(path): path for folder in folders for path in _places(folder)}
    return sorted(((path, _look(path)) for path in found.values()), key=_age, reverse=True)


def _places(folder: Path) -> list[Path]:
    if _is_place(folder):
        return [folder] if os.path.isdir(folder) else []
    try:
        inside = [path for path in folder.iterdir() if _is_place(path)]
    except PermissionError:
        return [folder]  # looking into it will say so
    except OSError:
        return []
    inside.sort(key=os.path.islink, reverse=True)  # under its own name, if it has several
    return [path for path in inside if os.path.isdir(path)]


def _is_place(path: Path) -> bool:
    """Whether a checkpoint is or should be there; not, if it is being deleted."""
    is_named = _NAME.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name)
    is_gone = path.name.endswith(REMOVED)
    return not is_gone and (bool(is_named) or os.path.exists(path / MANIFEST))


def _look(path: Path) -> Manifest | str:
    if path.name.endswith(UNFINISHED):
        return _IS_UNFINISHED
    try:
        return manifests.read(path)
    except ValueError as error:
        return str(error)


def _age(found: Candidate) -> tuple[int, float, str]:
    path, manifest = found
    if isinstance(manifest, Manifest):
        return manifest.step, manifest.saved_at, str(path)
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name else 0, 0.0, str(path)
