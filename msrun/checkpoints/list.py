"""``msrun checkpoints list``: a folder's items as a table or JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from agent.text.sanitize import sanitized
from agent.text.wording import duration, sized
from msrun.checkpoints.catalog import (
    FOREIGN,
    LEFTOVER,
    CheckpointItem,
    bytes_for_readers,
    damages_for_readers,
    fact,
)
from msrun.terminal.progress import bar
from msrun.terminal.stdout import put
from msrun.terminal.table import UNKNOWN, show_json, table
from worker_hooks.storage.manifest import Manifest
from worker_hooks.storage.safetensors_file import Header

COLUMNS = (
    "step", "epoch", "batch", "kind", "size", "ranks", "age", "complete", "verified", "name",
)  # fmt: skip
FACTS = ("step", "epoch", "batch", "world_size")
T = TypeVar("T")
BY_HEADER = "header"  # a foreign file has no checksum, only a header to check


def show(
    folder: Path, items: Sequence[CheckpointItem], now: float, *, verifies: bool, as_json: bool
) -> bool:
    """Print a line for each item; whether none is known to be damaged.

    ``now``: seconds since the epoch.
    """
    found: list[Sequence[str] | None] = [None] * len(items)
    if verifies:
        with bar("verifying", sum(map(bytes_for_readers, items))) as advance:
            found = [damages_for_readers(item, advance) for item in items]
    pairs = still_there(items, found)
    if as_json:
        show_json([described(item, flaws, now) for item, flaws in pairs])
    else:
        rows = [_row(folder, item, flaws, now) for item, flaws in pairs]
        put(table(COLUMNS, rows, styled="complete"))
        if notes := list(filter(None, (_note(folder, item, flaws) for item, flaws in pairs))):
            put("\n" + "\n".join(notes) + "\n")
    return not any(_flaws(item, flaws) for item, flaws in pairs)


def still_there(
    items: Sequence[CheckpointItem], found: Sequence[T]
) -> list[tuple[CheckpointItem, T]]:
    """Items, each with its finding, without those that training has deleted meanwhile."""
    pairs = zip(items, found, strict=True)
    return [one for one in pairs if os.path.lexists(one[0].path)]


def described(item: CheckpointItem, found: Sequence[str] | None, now: float) -> dict[str, Any]:
    """An item for JSON; ``found`` is ``None`` if checksums were not compared.

    ``verified`` is true, false or unknown; without checksums, as for a foreign file, never true.
    """
    has_sums = isinstance(item.content, Manifest)
    flaws = _flaws(item, found)
    return {
        "path": str(item.path.absolute()),
        "kind": item.kind,
        **{name: fact(item, name) for name in FACTS},
        "nbytes": item.nbytes,
        "saved_at": item.saved_at,
        "age_s": max(0.0, now - item.saved_at),
        "is_complete": item.is_complete,
        "verified": False if flaws else True if has_sums and found is not None else None,
        "damages": list(flaws),
        "record_id": item.content.record_id if isinstance(item.content, Manifest) else None,
        "reason": item.content.reason if isinstance(item.content, Manifest) else None,
    }


def named(folder: Path, path: Path) -> str:
    """The path, relative to the folder that the user named."""
    if path == folder:
        return path.name or str(path)
    return os.path.relpath(path, folder)


def _flaws(item: CheckpointItem, found: Sequence[str] | None) -> Sequence[str]:
    return found or item.flaws


def _row(
    folder: Path, item: CheckpointItem, found: Sequence[str] | None, now: float
) -> tuple[str, ...]:
    known = [fact(item, name) for name in FACTS]
    if isinstance(item.content, Manifest):
        known[1] = item.content.epoch + 1  # people count from one, as the names do
    step, epoch, batch, ranks = (UNKNOWN if one is None else str(one) for one in known)
    return (
        *(step, epoch, batch, item.kind, sized(item.nbytes), ranks),
        duration(now - item.saved_at) if item.saved_at else UNKNOWN,
        "yes" if item.is_complete else "no",
        _verified(item, found),
        named(folder, item.path),
    )


def _verified(item: CheckpointItem, found: Sequence[str] | None) -> str:
    if _flaws(item, found):
        return "damaged"
    if isinstance(item.content, Header):
        return BY_HEADER
    return UNKNOWN if found is None or item.content is None else "yes"


def _note(folder: Path, item: CheckpointItem, found: Sequence[str] | None) -> str:
    """Sentences below the table about an item; empty: none."""
    name = named(folder, item.path)
    if flaws := _flaws(item, found):
        return "\n".join(sanitized(f"damaged: {name}: {flaw}") for flaw in flaws)
    if item.kind == LEFTOVER:
        return sanitized(f"{name}: remains of a deletion; `msrun checkpoints prune` removes them")
    if not item.is_complete and item.kind != FOREIGN:
        return sanitized(f"{name}: unfinished: being written, or its save was interrupted")
    return ""
