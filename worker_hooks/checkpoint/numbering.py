"""Under which prefix a training saves its checkpoints: a number separates other trainings.

A run that resumes counts the checkpoints of its earlier attempts, and deletes them in turn. A run
that begins anew in a folder with checkpoints of another run does not touch those, and saves its own
as ``CKP_1``, as MindSpore does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from worker_hooks.contract.layout import BREAKPOINT, NUMBERED
from worker_hooks.storage import retention


def prefix_in(path: Path, prefix: str) -> str:
    """The prefix of a complete checkpoint with its number; empty: it has another prefix."""
    own = rf"({re.escape(prefix)}(?:_[1-9]\d*)?)"
    match = re.fullmatch(rf"{own}-\d+_\d+(?:{BREAKPOINT})?(?:{NUMBERED})?", path.name)
    return "" if match is None else match[1]


def choose_prefix(
    directory: Path,
    prefix: str,
    record_id: str,
    resumed: Path | None,
    lineage: Sequence[str] = (),
) -> str:
    """The prefix to save under. Only rank 0 needs it.

    Args:
        prefix: the one that the user gave.
        record_id: of this run; empty without msrun.
        resumed: the folder that this training resumed from; ``None``: it began anew.
        lineage: the runs that it resumed, if they are known, the newest first.

    Raises:
        OSError: the directory cannot be read.
    """
    is_here = resumed is not None and Path(os.path.realpath(resumed.parent)) == directory
    if resumed is not None and is_here and (found := prefix_in(resumed, prefix)):
        return found
    runs = (record_id, *lineage)
    there = retention.oldest_first(retention.present(directory), runs)
    taken = [(found, one) for path, one in there if (found := prefix_in(path, prefix))]
    mine = [found for found, one in taken if one.record_id == record_id != ""]
    if resumed is not None:
        mine = mine or [found for found, one in taken if not lineage or one.record_id in lineage]
    if mine:
        return mine[-1]
    number, free = 0, prefix
    while free in dict(taken):
        number += 1
        free = f"{prefix}_{number}"
    return free
