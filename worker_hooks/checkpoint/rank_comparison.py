"""Compares what the ranks hold, before the first checkpoint has one rank's state stand for all.

They do so through files in the unfinished folder, as without msrun there is nothing else that they
share. Each rank learns the answer, since each may have to write its own state.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from worker_hooks.checkpoint.rank_writer import (
    describe_error,
    failure_file,
    raise_reported,
    report_failure,
)
from worker_hooks.checkpoint.save_plan import CheckpointError, is_passing
from worker_hooks.contract.atomic_file import FOLDER_MODE, read_small, write_atomic
from worker_hooks.contract.fingerprint import Fingerprint, alike, describe, differences
from worker_hooks.contract.layout import CheckpointLayout
from worker_hooks.storage import commit

SUFFIX = ".holds.json"
LOOK_S = 0.02  # between two looks for other ranks' files


class Compared(NamedTuple):
    """What the ranks hold."""

    difference: str  # empty: there is none
    groups: tuple[tuple[int, ...], ...]  # of ranks that hold the same


def compare_ranks(
    layout: CheckpointLayout,
    ranks: tuple[int, int],
    texts: Mapping[str, str],
    check: Callable[[int], None],
    stall_s: float,
) -> Compared:
    """What differs between the ranks, and which of them hold the same.

    Args:
        layout: of the checkpoint that all ranks are about to write.
        ranks: this rank, and how many there are.
        check: called while others are awaited; may raise, to give up.
        stall_s: how long others are awaited.

    Raises:
        CheckpointError: a rank does not say what it holds.
        OSError: the folder cannot be written to.
    """
    rank, count = ranks
    folder = layout.unfinished
    commit.make_durable(folder.parent)
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    try:
        write_atomic(folder / _file(rank), json.dumps(dict(texts)).encode(), durable=False)
    except OSError as error:
        failed = failure_file(layout, rank)
        report_failure(failed, describe_error(error), passes=is_passing(error))
        raise
    found: dict[int, Fingerprint] = {}
    deadline = time.monotonic() + stall_s
    while True:
        for other in set(range(count)) - found.keys():
            is_failed = failure_file(layout, other).exists()
            with contextlib.suppress(FileNotFoundError):
                found[other] = json.loads(read_small(folder / _file(other)))
            if is_failed and other not in found:  # else it failed later, when it wrote its part
                raise_reported(layout, other)
        if len(found) == count:
            return Compared(describe(differences(found)), alike(found))
        check(0)
        if time.monotonic() > deadline:
            late = ", ".join(map(str, sorted(set(range(count)) - found.keys())))
            raise CheckpointError(
                f"{layout.folder} cannot be saved: rank {late} did not say what it holds in "
                f"{stall_s:g} s"
            )
        time.sleep(LOOK_S)


def remove_all_else(unfinished: Path) -> None:
    """Remove what was written of a checkpoint that failed, but not what the ranks hold.

    A slow rank may not have read it yet, and each rank compares until it knows the answer: one that
    did not would wait for the others at the next checkpoint, where they do not compare any more.
    """
    with contextlib.suppress(OSError):
        for path in unfinished.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif not path.name.endswith(SUFFIX):
                path.unlink(missing_ok=True)
        os.rmdir(unfinished)


def _file(rank: int) -> str:
    return f"rank_{rank}{SUFFIX}"
