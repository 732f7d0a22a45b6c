"""What the controller promises about a dump in memory, and about the one that it becomes on disk.

Not a test itself.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from agent.controller import actions as do
from agent.controller import events as ev

if TYPE_CHECKING:
    from support.simulator.dump_promises import DumpWatch


def check_leaving(dump: DumpWatch, action: do.SaveRanks) -> None:
    """For a reason; then all are asked again, as if for the first time."""
    differ = False  # without a majority, in a replica group
    for group in dump.watch.same.replicas():
        votes = Counter(dump.digests[rank] for rank in group if rank in dump.digests)
        differ |= bool(votes) and 2 * max(votes.values()) <= votes.total()
    if not (dump.full or dump.failed or differ or len(dump.asked - dump.reachable())):
        dump.broken(f"{action}: nothing is wrong with the memory")
    dump.since, dump.orders = action.round, []
    dump.full, dump.failed, dump.asked, dump.digests = {do.MEMORY}, set(), set(), {}
    dump.stuck.clear()


def check_fall(dump: DumpWatch, action: do.CommitDump) -> None:
    """What is in memory goes to disk, to the next place that may take it."""
    kept, had = dump.node.replicas.disk.memory, dump.had
    if had is None or kept != (dump.memory, action.step) or action.dump_id != dump.last_id:
        dump.broken(f"{action}, but in memory is {kept}")
    if dump.commit is not None or action.step <= max(dump.saved, 0):
        dump.broken(f"{action} twice, or it is there already")
    if (action.variants, action.odd) != (had.variants, had.odd):
        dump.broken(f"{action}, but it was {had}")
    if not dump.is_fall:
        dump.full = set()
    if action.place != len(dump.full):
        dump.broken(f"{action}, but {dump.full} are full")
    dump.open, dump.is_fall, dump.commit = True, True, action
    dump.watch.is_first_raised = False  # whoever ends from now on is no cause of it


def completed(dump: DumpWatch, event: ev.Event) -> None:
    """In memory: the job goes on from there, or that goes to disk; nothing is saved yet."""
    is_it = isinstance(event, ev.DumpCommitted) and event.dump_id == dump.last_id
    if not is_it or dump.commit is None or dump.commit.place != do.MEMORY or not dump.open:
        return
    dump.memory, dump.had, dump.commit, dump.open = event.path, dump.commit, None, False
    dump.watch.replacing.committed(event.path)
