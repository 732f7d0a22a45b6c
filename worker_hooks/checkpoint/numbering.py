"""Under which prefix a training's checkpoints are counted: a number tells strangers apart.

A run that goes on counts the checkpoints of the lives before it, and lets them go in their turn.
One that begins anew in a folder with another's checkpoints leaves those alone, and saves its own
as ``CKP_1``, as MindSpore does.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from worker_hooks.contract.layout import BREAKPOINT, REPLACED
from worker_hooks.storage import retention
from worker_hooks.storage.manifest import Manifest


def numbered(path: Path, prefix: str) -> str:
    """The prefix that a complete checkpoint was counted under; empty: it is none of this prefix."""
    own = rf"({re.escape(prefix)}(?:_[1-9]\d*)?)"
    match = re.fullmatch(rf"{own}-\d+_\d+(?:{BREAKPOINT})?(?:{REPLACED}\d+)?", path.name)
    return "" if match is None else match[1]


def prefix_of(directory: Path, prefix: str, record_id: str, resumed: Path | None) -> str:
    """The prefix to save under. Rank 0 alone needs to know it.

    Args:
        directory: where checkpoints are.
        prefix: the one that the user gave.
        record_id: of this run; empty without msrun.
        resumed: the folder this training went on from; ``None``: it began anew.

    Raises:
        OSError: the directory cannot be read.
    """
    is_here = resumed is not None and Path(os.path.realpath(resumed.parent)) == directory
    if resumed is not None and is_here and (found := numbered(resumed, prefix)):
        return found
    newest: dict[str, Manifest] = {}
    present = retention.present(directory)
    for path, manifest in sorted(present, key=lambda one: one[1].saved_at):
        if found := numbered(path, prefix):
            newest.pop(found, None)
            newest[found] = manifest  # the newest is the last
    mine = [found for found, one in newest.items() if one.record_id == record_id != ""]
    if resumed is not None:
        mine = mine or list(newest)
    if mine:
        return mine[-1]
    number, free = 0, prefix
    while free in newest:
        number += 1
        free = f"{prefix}_{number}"
    return free
