"""The private state of every rank of a job as of one step, from the pages that outlive the ranks.

Used by the agent, and by workers whose agent is dead. A worker writes its page, so no content is
trusted to be sound: a page that cannot be read counts as missing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from worker_hooks.contract.status_page import CommitRecord, Page
from worker_hooks.storage import late_entries, late_values

UNSOUND = (ValueError, TypeError, IndexError, RecursionError, struct.error)
"""What reading a page raises that is none."""


def record(page: Page | None, step: int) -> CommitRecord | None:
    """A rank's private state as of ``step``, else of its newest commit, else ``None``."""
    if page is None:
        return None
    try:
        found = page.record(step) or page.newest()
        wanted = sum(entry.nbytes for entry in page.entries)
    except UNSOUND:
        return None
    return found if found is not None and len(found.payload) == wanted else None


def completed(
    pages: Mapping[int, Page], ranks: Iterable[int], step: int
) -> dict[int, CommitRecord]:
    """The records of those of these ranks that have one, with what a dead rank's lacks.

    Raises:
        UnknownStateError: some rank did not reach the commit of ``step``, and what it would have
            then cannot be known.
    """
    found = {rank: record(pages.get(rank), step) for rank in ranks}
    there = {rank: one for rank, one in found.items() if one is not None}
    entries = {rank: pages[rank].entries for rank in there}

    def earlier(rank: int, step: int) -> CommitRecord | None:
        found = record(pages.get(rank), step)
        return found if found is not None and found.is_commit and found.step == step else None

    records = late_entries.completed(there, earlier, entries, step)
    return late_values.completed(records, earlier, entries, step)
