"""``msrun checkpoints prune``: deletes old checkpoints; the newest verified one always stays."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from agent.spec.job_spec import UsageError
from agent.text.sanitize import sanitized
from agent.text.wording import sized
from msrun.checkpoints.catalog import LEFTOVER, CheckpointItem, bytes_to_read, checkpoints, damages
from msrun.checkpoints.list import named
from msrun.terminal.progress import bar, counted, say
from msrun.terminal.stdout import put
from worker_hooks.storage import retention


class PruneRule(NamedTuple):
    """What stays."""

    keep: int  # how many of the newest; 0: no such rule
    per_minutes: int
    prefix: str | None  # only periodic checkpoints with this prefix


def prune(
    folder: Path, items: Sequence[CheckpointItem], rule: PruneRule, *, is_dry: bool, is_sure: bool
) -> bool:
    """Delete the oldest checkpoints of a folder, and the remains of earlier deletions.

    ``is_dry``: only print what would be deleted. ``is_sure``: do not ask.

    Returns:
        False if no checkpoint is complete, so that nothing may be deleted.

    Raises:
        UsageError: there is nothing to prune, nobody to ask, or something cannot be deleted.
    """
    if any(item.path == folder for item in items):
        raise UsageError(f"{folder} is a checkpoint itself: name the folder that holds it")
    left = [item for item in items if item.kind == LEFTOVER]
    if not left and not checkpoints(items):
        raise UsageError(f"{folder} holds no complete checkpoint of msrun: nothing to prune")
    going = _going(items, rule)
    if going is None:
        say(f"no checkpoint in {folder} is complete: nothing is deleted")
        return False
    lines = [_words(folder, item) for item in (*left, *going)]
    stay = counted(len(checkpoints(items)) - len(going), "checkpoint")
    nbytes = sized(sum(item.nbytes for item in (*left, *going)))
    if not lines:
        put(f"nothing to delete: {stay}\n")
    elif is_dry:
        put("".join(f"would delete {line}\n" for line in lines) + f"{nbytes}; {stay} would stay\n")
    elif is_sure or _agrees(lines, nbytes):
        _delete(folder, going)
        put("".join(f"deleted {line}\n" for line in lines) + f"{nbytes}; {stay} left\n")
    return True


def _going(items: Sequence[CheckpointItem], rule: PruneRule) -> list[CheckpointItem] | None:
    """What the rule deletes, the oldest first; ``None``: no checkpoint passes verification."""
    known = {item.path: (item, manifest) for item, manifest in checkpoints(items)}
    meant = [
        (path, manifest)
        for path, (_, manifest) in known.items()
        if not path.is_symlink() and (rule.prefix is None or retention.is_of(path, rule.prefix))
    ]
    if not retention.chosen(meant, rule.keep, rule.per_minutes):
        return []
    spared = _newest_verified([item for item, _ in known.values()])
    if spared is None:
        return None
    going = retention.chosen(meant, rule.keep, rule.per_minutes, [spared.path])
    return [known[path][0] for path in going]


def _newest_verified(newest_first: Sequence[CheckpointItem]) -> CheckpointItem | None:
    """The checkpoint that a resume takes; ``None``: there is none."""
    for item in newest_first:
        with bar("verifying the newest", bytes_to_read(item)) as advance:
            found = damages(item, advance)
        if not found:
            return item
        say(sanitized(f"{item.path} is damaged: {found[0]}"))
    return None


def _words(folder: Path, item: CheckpointItem) -> str:
    of = "remains of a deletion" if item.kind == LEFTOVER else f"step {_step(item)}"
    return sanitized(f"{named(folder, item.path)} ({of}, {sized(item.nbytes)})")


def _step(item: CheckpointItem) -> int:
    return checkpoints([item])[0][1].step


def _agrees(lines: Sequence[str], nbytes: str) -> bool:
    if not (os.isatty(0) and sys.stdout is not None and sys.stdout.isatty()):
        raise UsageError(
            f"{counted(len(lines), 'folder')} ({nbytes}) would be deleted, and there is no "
            "terminal to ask: give --yes, or --dry-run to see them"
        )
    put("".join(f"{line}\n" for line in lines) + f"Delete {nbytes}? [y/N] ")
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _delete(folder: Path, going: Sequence[CheckpointItem]) -> None:
    try:
        retention.sweep(folder)
        for item in going:
            retention.remove(item.path)
    except OSError as error:
        raise UsageError(
            f"{error.filename or folder} cannot be deleted ({error.strerror})"
        ) from error
