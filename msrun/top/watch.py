"""``msrun top``: watches a running job at no cost for the job."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

from rich.text import Text

from agent.records.run_record import Record
from agent.spec.job_spec import UsageError
from agent.text.log_lines import last_lines, log_lines
from msrun.runs.choice import chosen
from msrun.runs.log_files import Wanted, checked_attempt, is_shared, views
from msrun.runs.run_state import RunState, has_ended, look, open_process
from msrun.terminal.stdout import ReaderLeftError, put
from msrun.terminal.table import is_terminal, plain_console
from msrun.top import frame
from msrun.top.columns import ASCII_BLOCKS, BLOCKS
from msrun.top.facts import JobFacts
from msrun.top.gather import Gatherer
from msrun.top.screen import Screen
from msrun.top.view import TopView
from worker_hooks.contract.atomic_file import read_end

GPU_WAIT_S = 3.0  # of a single frame, for the first answer
LOG_BYTES = 1 << 16
ELSEWHERE = "it is on another node: msrun logs --rank {} shows it"


def top(environ: Mapping[str, str], name: str | None, interval_s: float, *, once: bool) -> None:
    """Show a run until it ends or the user quits; of an ended run print one sentence.

    Args:
        name: a run; ``None`` for the newest of this folder, a living one first.
        interval_s: time from one frame to the next.
        once: only one frame, as into a pipe.

    Raises:
        UsageError: there is no such run.
        ReaderLeftError: nobody reads the output any more.
    """
    record = chosen(environ, name, "msrun top")
    process = open_process(record)
    if process is None:
        put(f"run {record.record_id} is not running: {look(record).state_words}\n")
        return
    watched = _Watched(environ, record)
    try:
        if once or not is_terminal():
            put(_plain(watched.gather.look(gpu_wait_s=GPU_WAIT_S)[1]))
        else:
            _watch(watched, process, interval_s)
    finally:
        watched.gather.close()
        os.close(process)


class _Watched:
    """The run that an msrun is at: there is another one once the nodes of a job have met again."""

    def __init__(self, environ: Mapping[str, str], record: Record) -> None:
        self._environ = environ
        self.gather = Gatherer(environ, record)

    def look(self) -> tuple[RunState, JobFacts]:
        """That run as it is now."""
        if (following := self.gather.following()) is not None:
            self.gather.close()
            self.gather = Gatherer(self._environ, following)
        return self.gather.look()


def _watch(watched: _Watched, process: int, interval_s: float) -> None:
    view = TopView()
    with Screen(process) as screen:
        while not has_ended(process, 0.0):
            run, job = watched.look()
            again = time.monotonic() + interval_s
            while (left_s := again - time.monotonic()) > 0 and not has_ended(process, 0.0):
                rows, size = len(job.ranks), screen.size
                view = view.settled(rows, frame.room(size.lines))
                screen.draw(_frame(run, job, view, size))
                for key in screen.wait(left_s):
                    if key == "quit":
                        return
                    view = view.after(key, rows, frame.room(size.lines))
    put(_plain(watched.look()[1]))


def _frame(run: RunState, job: JobFacts, view: TopView, size: os.terminal_size) -> Sequence[Text]:
    if not (view.is_log and job.ranks):
        return frame.screen(job, view, size, _blocks())
    path, tail = _log(run, job.ranks[view.selected].rank, size.lines)
    return frame.log(job, view, size, path, tail)


def _log(run: RunState, rank: int, lines: int) -> tuple[str, Sequence[str]]:
    """A rank's log file and its last lines; of several files the one that changed last."""
    wanted = Wanted(rank)
    if not (run.record.has_rank(rank) or is_shared(run)):
        return "no log", (ELSEWHERE.format(rank),)
    try:
        paths = [view.path for view in views(run, wanted, checked_attempt(run, wanted))]
        newest = max(filter(os.path.isfile, paths), key=os.path.getmtime)
        raw, before = read_end(newest, LOG_BYTES)
    except (OSError, ValueError, UsageError):
        if not run.record.has_rank(rank):
            return "no log", (ELSEWHERE.format(rank),)
        return "no log", ("the rank wrote nothing, or --log-dir /dev/null is set",)
    return str(newest), last_lines(log_lines(raw, cut=before > 0), lines)


def _plain(job: JobFacts) -> str:
    """A frame with all ranks, for a terminal or a pipe."""
    width = shutil.get_terminal_size().columns
    console = plain_console(width)
    with console.capture() as captured:
        for line in frame.table(job, width, _blocks()):
            line.rstrip()
            console.print(line, no_wrap=True, overflow="crop")
    return captured.get()


def _blocks() -> str:
    """The characters of the chart that stdout's encoding has."""
    if sys.stdout is None:
        raise ReaderLeftError
    try:
        BLOCKS.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return ASCII_BLOCKS
    return BLOCKS
