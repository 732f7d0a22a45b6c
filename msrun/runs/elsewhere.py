"""The log of a rank that runs on another node of the job: this node's msrun is asked for it.

Nothing is read from where it lies as long as the job lives: which files it is, and when a new
process of the rank has begun another one, only that node knows.
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from contextlib import closing

from agent.nodes.run_messages import NO_NODE, NOW, LogAsked, LogRead
from agent.rank_logs.question import ANSWER_S, LogLine, NoAnswerError
from agent.records.run_record import records, successor
from agent.spec.job_spec import UsageError
from msrun.runs.log_files import STDOUT, Wanted
from msrun.runs.run_state import RunState, has_ended, look
from msrun.terminal.progress import say
from msrun.terminal.stdout import put_bytes

PAUSE_S = 0.01  # between two pieces of a long log: msrun has other things to do
RETRY_S = 0.5  # after a question without an answer


class UnansweredError(UsageError):
    """Nobody can say what a rank's log holds: one sentence."""

    exit_code = 1


def is_foreign(run: RunState, wanted: Wanted) -> bool:
    """Whether one rank is meant, of another node, or that node's msrun.

    Raises:
        UsageError: there is no other node.
    """
    if wanted.node is not None:
        if wanted.node != run.record.node and not run.record.host:
            raise UsageError(f"run {run.record.record_id} has one node: remove --node")
        return wanted.node != run.record.node
    return wanted.rank is not None and not run.record.has_rank(wanted.rank)


def name_of(run: RunState, wanted: Wanted) -> str:
    """What is meant, of another node."""
    what = f"rank {wanted.rank}" if wanted.node is None else f"msrun of node {wanted.node}"
    return f"{what} of run {run.record.record_id}"


def seen_run(environ: Mapping[str, str], run: RunState, wanted: Wanted) -> RunState:
    """The job's run on the node that is meant, if its files are seen here, else that of this node.

    Nodes that share the folder of the records see each other's.
    """
    for other in records(environ):
        is_node = other.node == wanted.node if wanted.scheduler else wanted.rank in other.ranks
        if other.saves_as == run.record.saves_as and other.host and is_node:
            found = look(other)
            if found.folder.is_dir():
                return found
    return run


class _Log:
    """How far a rank's log was read."""

    def __init__(self, run: RunState, wanted: Wanted) -> None:
        self._name = name_of(run, wanted)
        self._rank = NOW if wanted.rank is None else wanted.rank
        self._node = NO_NODE if wanted.node is None else wanted.node
        self._is_one = wanted.attempt is not None
        self._begin(NOW if wanted.attempt is None else wanted.attempt)
        self.is_over = False
        """Whether there will be nothing more of it."""
        self.is_whole = False
        """Whether all of it was shown, as of the newest answer."""

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._known = [0, 0, 0]

    def question(self, *, waits: bool) -> LogAsked:
        """What comes next."""
        known = tuple(self._known)
        return LogAsked(0, self._rank, self._attempt, known, waits, self._node)

    def show(self, read: LogRead) -> str:
        """Show an answer; why there is none, or an empty text.

        Raises:
            UsageError: there will never be one.
        """
        if read.why_not and read.is_rest:
            raise UsageError(f"{self._name} has no log: {read.why_not}")
        if read.following != NOW and not read.data and not self._is_one:
            self._begin(read.following)
            return ""
        if read.why_not:
            self.is_over = read.following != NOW
            return f"{self._name}: {read.why_not}"
        if not self._is_one:
            self._attempt = read.began
        if read.data and self._known[read.file] == read.at:  # else it was told before
            self._known[read.file] += len(read.data)
            put_bytes(STDOUT, read.data)
        self.is_whole = read.is_rest
        self.is_over = self._is_one and read.following != NOW and not read.data
        return ""


def show(run: RunState, wanted: Wanted) -> None:
    """Print such a log as it is now.

    Raises:
        UnansweredError: nobody can say.
        UsageError: there is no such rank or attempt.
    """
    log = _Log(run, wanted)
    try:
        with closing(LogLine(run.record.record_id, run.record.pid)) as line:
            _show(line, log)
    except NoAnswerError as error:
        raise UnansweredError(_unanswered(run, error)) from error


def _show(line: LogLine, log: _Log) -> None:
    most: int | None = None  # as much as there was at first: it may grow faster than it is read
    while most is None or most > 0:
        line.ask(log.question(waits=False))
        read = line.answer()
        if why := log.show(read):
            raise UnansweredError(why)
        if not read.data:
            return
        most = (read.left + len(read.data) if most is None else most) - len(read.data)
        time.sleep(PAUSE_S)


def _unanswered(run: RunState, error: NoAnswerError) -> str:
    return f"msrun (pid {run.record.pid}) of run {run.record.record_id} {error}"


def follow(
    environ: Mapping[str, str], run: RunState, wanted: Wanted, process: int
) -> RunState | None:
    """Print such a log as it grows, until the run has ended.

    Returns:
        The run that its msrun goes on with, if the rank is on this node from now on.

    Raises:
        UnansweredError: msrun cannot be asked.
        UsageError: there is no such rank or attempt.
    """
    log, said, was_heard = _Log(run, wanted), "", False
    while True:
        try:
            with closing(LogLine(run.record.record_id, run.record.pid)) as line:
                was_heard = True
                if not (why := _follow(line, log)):
                    return None
        except NoAnswerError as error:
            why = ""
            if not was_heard and not has_ended(process, 0.0):
                raise UnansweredError(_unanswered(run, error)) from error
        if has_ended(process, RETRY_S):
            if not log.is_whole:
                say(f"the last lines of {name_of(run, wanted)} may be missing: its node has them")
            return None
        if (following := successor(environ, run.record)) is not None:
            run, log = look(following), _Log(look(following), wanted)
            if not is_foreign(run, wanted):
                return run
        if why not in {"", said}:
            said = why
            say(why)


def _follow(line: LogLine, log: _Log) -> str:
    """Read on; why that is not possible now. Empty: nobody wants more."""
    waiting = select.poll()
    waiting.register(line, select.POLLIN)
    waiting.register(STDOUT, 0)  # only its hang-up: the reader is gone
    while True:
        line.ask(log.question(waits=True))
        happened = dict(waiting.poll(int(ANSWER_S * 1000)))
        if STDOUT in happened:
            return ""
        read = line.answer()
        why = log.show(read)
        if why or log.is_over:
            return why
        if read.left:
            time.sleep(PAUSE_S)
