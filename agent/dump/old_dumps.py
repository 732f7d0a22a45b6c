"""Deletes old dumps of a run, and of those that it resumed, once a newer one is complete."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.layout import DUMP
from worker_hooks.storage import retention
from worker_hooks.storage.manifest import DUMP_KIND, verify


def remove_old(
    newest: Path, keep: int, runs: Sequence[str], until: int, spared: Collection[Path]
) -> str:
    """Delete the oldest dumps beside a complete one; return why nothing more can be deleted.

    Args:
        newest: the dump that was just saved; other folders are not looked at.
        keep: how many stay, the newest included; 0: all.
        runs: record ids of this run and of those that it resumed, the newest first.
        until: the step that this run began from; later ones of those runs are not its past.
        spared: folders that are still needed.
    """
    if not keep or not newest.name.startswith(DUMP):
        return ""  # an exception's is ModelCheckpoint's to delete
    try:
        dumps = [
            (path, manifest)
            for path, manifest in retention.present(newest.parent)
            if path.name.startswith(DUMP) and manifest.kind == DUMP_KIND
        ]
        found = retention.of_lineage(dumps, runs, until)
        saved = next((manifest for path, manifest in found if path == newest), None)
        if saved is None or saved.is_disputed or verify(newest, saved, quick=True):
            return ""  # nobody can resume from it
        needed = {os.path.realpath(each) for each in spared}
        for path in retention.chosen(found, keep, 0, (), runs, newest):
            if os.path.realpath(path) not in needed:
                retention.remove(path)
    except OSError as error:
        return f"an old dump cannot be deleted: {describe_os_error(error)}"
    return ""
