"""``msrun logs``: what the workers wrote, once or as it comes."""

from __future__ import annotations

import os
import select
from pathlib import Path

from agent.spec import UsageError
from agent.tail import Follower, Tail
from msrun.log_files import STDOUT, Wanted, checked_attempt, views
from msrun.run_state import RunState, last_word, look, open_process
from msrun.stdout import put_bytes

POLL_S = 0.2  # for the next attempt; lines of the present one come as they are written
PATIENCE_S = 60.0


def show(run: RunState, wanted: Wanted) -> None:
    """Print the logs as they are now, ordered by rank.

    Raises:
        UsageError: no such rank or attempt, or the files are gone.
    """
    found = views(run, wanted, checked_attempt(run, wanted))
    existing = [view for view in found if view.path.is_file()]
    if not existing:
        raise UsageError(_why_none(run, wanted))
    for view in existing:
        _show(Follower(view))


def _show(follower: Follower) -> None:
    while follower.read(put_bytes):
        pass
    follower.finish(put_bytes)


def _why_none(run: RunState, wanted: Wanted) -> str:
    name = f"run {run.record.record_id}"
    if not run.folder.is_dir():
        return f"the log folder of {name} is gone: {run.folder}"
    if run.word is None and run.alive and not wanted.scheduler:
        return f"{name} is still starting: it has no worker logs yet"
    what = "scheduler.log" if wanted.scheduler else "worker logs"
    return f"{name} has no {what} in {run.folder}: removed, or switched off with --log-dir /dev/null"


def follow(run: RunState, wanted: Wanted) -> None:
    """Print the logs as they grow, this attempt's and the next ones', until the run has ended.

    Raises:
        UsageError: no such rank or attempt, or the files are gone.
    """
    process = open_process(run.record)
    if process is None:
        show(look(run.record), wanted)
        return
    try:
        _follow(run, wanted, process)
    finally:
        os.close(process)


def _follow(run: RunState, wanted: Wanted, process: int) -> None:
    tail, shown = Tail(), -1
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    waiting.register(STDOUT, 0)  # only its hang-up: the reader left
    ended = False
    while True:
        run = look(run.record)
        newest = checked_attempt(run, wanted) if run.word or wanted.scheduler else -1
        first = newest if shown < 0 or wanted.attempt is not None else shown + 1
        for attempt in range(first, newest + 1):
            if attempt > shown:
                ...
        if ended:
            break
