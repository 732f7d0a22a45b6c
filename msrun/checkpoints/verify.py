"""``msrun checkpoints verify``: compares all files with their checksums."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent.text.sanitize import sanitized
from agent.text.wording import sized
from msrun.checkpoints.catalog import (
    FOREIGN,
    LEFTOVER,
    CheckpointItem,
    bytes_for_readers,
    damages_for_readers,
)
from msrun.checkpoints.list import described, named, still_there
from msrun.terminal.progress import bar, counted
from msrun.terminal.stdout import put
from msrun.terminal.table import show_json

Pair = tuple[CheckpointItem, Sequence[str]]


def verify(folder: Path, items: Sequence[CheckpointItem], *, as_json: bool) -> bool:
    """Print a line for each complete item, one for each damage, and the totals.

    Returns:
        Whether something is complete and nothing damaged. An unfinished checkpoint is neither.
    """
    began = time.monotonic()
    total = sum(map(bytes_for_readers, items))
    with bar("verifying", total) as advance:
        found = [damages_for_readers(item, advance) for item in items]
    took_s = time.monotonic() - began
    pairs = still_there(items, found)
    if as_json:
        now = time.time()
        show_json([described(item, flaws, now) for item, flaws in pairs])
    else:
        lines = [line for item, flaws in pairs for line in _lines(folder, item, flaws)]
        put("\n".join(map(sanitized, (*lines, _sum(pairs, total, took_s)))) + "\n")
    return _whole(pairs) > 0 and not any(flaws for _, flaws in pairs)


def _whole(pairs: Sequence[Pair]) -> int:
    return sum(item.is_complete and not flaws for item, flaws in pairs)


def _lines(folder: Path, item: CheckpointItem, flaws: Sequence[str]) -> Iterator[str]:
    name = named(folder, item.path)
    if flaws:
        yield from (f"damaged: {name}: {flaw}" for flaw in flaws)
    elif item.kind == LEFTOVER:
        yield f"skipped: {name}: remains of a deletion"
    elif not item.is_complete:
        yield f"skipped: {name}: unfinished"
    elif item.kind == FOREIGN:
        yield f"sound: {name}: header and sizes fit; the file has no checksums"
    else:
        yield f"whole: {name}"


def _sum(pairs: Sequence[Pair], nbytes: int, took_s: float) -> str:
    damaged = sum(bool(flaws) for _, flaws in pairs)
    read = f"; {sized(nbytes)} compared in {took_s:.1f} s" if nbytes else ""
    return f"{counted(len(pairs), 'item')}: {_whole(pairs)} whole, {damaged} damaged{read}"
