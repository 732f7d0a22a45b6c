"""``msrun logs``: the workers' output, once or as it grows."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Mapping

from agent.records.log_view import LogView
from agent.records.run_record import successor
from agent.records.tail import Follower, Tail
from agent.spec.job_spec import UsageError
from agent.text.wording import ranged
from msrun.runs import elsewhere
from msrun.runs.elsewhere import UnansweredError
from msrun.runs.log_files import STDOUT, Wanted, checked_attempt, is_shared, views
from msrun.runs.run_state import RunState, look, open_process
from msrun.terminal.progress import say
from msrun.terminal.stdout import put_bytes

POLL_S = 0.2  # between two looks for the next attempt; new lines need no look
PATIENCE_S = 60.0
BEFORE_ALL = -1  # in place of the newest attempt that is shown, of a run that follows on another


def show(environ: Mapping[str, str], run: RunState, wanted: Wanted) -> None:
    """Print the logs as they are now, ordered by rank.

    Raises:
        UnansweredError: a rank's log is on another node, which cannot be asked.
        UsageError: no such rank or attempt, or the files are gone.
    """
    if not elsewhere.is_foreign(run, wanted):
        _show_here(run, wanted)
        _say_others(run, wanted)
        return
    checked_attempt(run, wanted)
    if run.alive:
        elsewhere.show(run, wanted)
        return
    seen = elsewhere.seen_run(environ, run, wanted)
    if not _has_file(seen, wanted):
        name = elsewhere.name_of(run, wanted)
        raise UnansweredError(
            f"{name} ran on another node, and its log is there: {run.state_words}"
        )
    _show_here(seen, wanted)


def _show_here(run: RunState, wanted: Wanted) -> None:
    found = views(run, wanted, checked_attempt(run, wanted))
    existing = [view for view in found if os.path.isfile(view.path)]
    if not existing:
        raise UsageError(_why_none(run, wanted))
    for view in existing:
        _show(view)


def _show(view: LogView) -> None:
    try:
        follower = Follower(view)
    except OSError as error:
        raise UsageError(f"{view.path} cannot be read ({error.strerror})") from error
    while follower.read(put_bytes):
        pass
    follower.finish(put_bytes)


def _why_none(run: RunState, wanted: Wanted) -> str:
    name = f"run {run.record.record_id}"
    if run.record.host and not (run.record.ranks or wanted.scheduler):
        return f"the ranks of {name} run on other nodes: --rank N shows the log of one"
    if not os.path.isdir(run.folder):
        return f"the log folder of {name} is gone: {run.folder}"
    if run.status is None and run.alive and not wanted.scheduler:
        return f"{name} is still starting: it has no worker logs yet"
    what = "scheduler.log" if wanted.scheduler else "worker logs"
    return f"{name} has no {what} in {run.folder}: they were removed, or --log-dir /dev/null is set"


def follow(environ: Mapping[str, str], run: RunState, wanted: Wanted) -> None:
    """Print the logs of this attempt and the next ones as they grow, until the run has ended.

    If its msrun goes on with another run, as after the loss of node 0, that one's follow.

    Raises:
        UnansweredError: a rank's log is on another node, which cannot be asked.
        UsageError: no such rank or attempt, or the files are gone.
    """
    if sys.stdout is None:  # closed
        return
    process = open_process(run.record)
    if process is None:
        show(environ, look(run.record), wanted)
        return
    try:
        if not elsewhere.is_foreign(run, wanted):
            _say_others(run, wanted)
            _follow(environ, run, wanted, process)
        elif (following := elsewhere.follow(environ, run, wanted, process)) is not None:
            _follow(environ, following, wanted, process)
    finally:
        os.close(process)


def _say_others(run: RunState, wanted: Wanted) -> None:
    """Whose logs are not shown, though all are asked for."""
    if wanted.rank is not None or wanted.scheduler or run.status is None:
        return
    found = views(run, wanted, checked_attempt(run, wanted))
    seen = {view.rank for view in found if os.path.isfile(view.path)}
    foreign = (each.rank for each in run.status.workers if not run.record.has_rank(each.rank))
    missing = [rank for rank in foreign if rank not in seen]
    if missing:
        is_one = len(missing) == 1
        where = "is on another node" if is_one else "are on other nodes"
        number = missing[0] if is_one else "N"
        say(f"{ranged(missing)} {where}: msrun logs --rank {number} shows its log")


def _has_file(run: RunState, wanted: Wanted) -> bool:
    """Whether a log is seen here.

    Raises:
        UsageError: there is no such rank or attempt.
    """
    if wanted.scheduler:
        is_seen = run.record.node == wanted.node or is_shared(run)
        return is_seen and views(run, wanted, 0)[0].path.is_file()
    ranks = [each.rank for each in run.status.workers] if run.status else []
    if wanted.rank not in ranks and all(map(run.record.has_rank, ranks)):
        return False  # of very many ranks the status has those of this node alone
    found = views(run, wanted, checked_attempt(run, wanted))
    is_own = wanted.rank is not None and run.record.has_rank(wanted.rank)
    return (is_own or is_shared(run)) and any(os.path.isfile(view.path) for view in found)


def _follow(environ: Mapping[str, str], run: RunState, wanted: Wanted, process: int) -> None:
    tail = Tail()
    shown = _follow_new(tail, run, wanted, None)
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    waiting.register(STDOUT, 0)  # only its hang-up: the reader is gone
    ended = False
    while not ended:
        happened = dict(waiting.poll(int(POLL_S * 1000)))
        if STDOUT in happened:
            return
        ended = process in happened
        if (following := successor(environ, run.record)) is not None:
            run, shown = look(following), BEFORE_ALL
        shown = _follow_new(tail, look(run.record), wanted, shown)
    while not tail.close(PATIENCE_S):
        pass  # a pager may pause for any time


def _follow_new(tail: Tail, run: RunState, wanted: Wanted, shown: int | None) -> int | None:
    """Follow the attempts after ``shown``; the newest one followed, ``None`` before the first.

    msrun creates an attempt's files before ``status.json`` names that attempt.
    """
    if run.status is None and not wanted.scheduler:
        return shown
    newest = checked_attempt(run, wanted)
    for attempt in range(newest if shown is None else shown + 1, newest + 1):
        found = views(run, wanted, attempt, is_new=shown is not None)
        existing = [view for view in found if os.path.isfile(view.path)]
        if not existing and shown is None:
            raise UsageError(_why_none(run, wanted))
        if not existing and shown == BEFORE_ALL:
            return shown  # another node has told of the attempt before this one has begun it
        tail.follow(existing, None if shown is None else frozenset(view.rank for view in found))
    return newest
