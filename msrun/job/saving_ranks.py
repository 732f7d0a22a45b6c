"""Ranks of a run whose msrun was killed save by themselves: a resume has to wait for them.

Else it would begin from an older step, or find none, while they write the newest.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from agent.records.run_record import Record
from agent.text.wording import ranged
from msrun.runs.run_state import RunState, has_ended, look
from worker_hooks.contract.process_stat import read_stat

MOST_S = 1800.0  # as long as their forkserver lets them save
_CLOCK_S = 1.0  # by which two clocks may differ
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def await_ranks(record: Record, say: Callable[[str], None], most_s: float = MOST_S) -> None:
    """Wait until the ranks of a run that has lost its msrun have saved and left.

    Args:
        record: of the run.
        say: takes a sentence, if there is something to wait for.
        most_s: how long it is waited for at most.
    """
    ranks = _saving(look(record))
    try:
        if not ranks:
            return
        who = ranged(ranks)
        say(f"run {record.record_id} has lost its msrun: waiting for {who} to save and end")
        until_s = time.monotonic() + most_s
        left = [
            rank
            for rank, process in ranks.items()
            if not has_ended(process, max(0.0, until_s - time.monotonic()))
        ]
        if left:
            say(f"not waiting any longer than {most_s:g} s for {ranged(left)}")
    finally:
        for process in ranks.values():
            os.close(process)


def _saving(state: RunState) -> dict[int, int]:
    """By rank a pidfd of its process, as far as it lives."""
    found: dict[int, int] = {}
    record = state.record
    is_here = not state.elsewhere or record.host == socket.gethostname()
    if state.status is None or state.alive or state.ended or not is_here:
        return found
    for worker in state.status.workers:
        if worker.pid is None or worker.ended is not None or not record.has_rank(worker.rank):
            continue
        try:
            process = os.pidfd_open(worker.pid)
        except OSError:
            continue  # it has ended
        if _is_older(worker.pid, state.status.updated):
            found[worker.rank] = process
        else:
            os.close(process)
    return dict(sorted(found.items()))


def _is_older(pid: int, at: float) -> bool:
    """Whether a process lives that was there at this time; else another one has got its number.

    ``at``: in seconds since the epoch.
    """
    found = read_stat(pid)
    if found is None or found.is_dead:
        return False
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - found.born / _TICKS_PER_S
    return time.time() - age_s <= at + _CLOCK_S
