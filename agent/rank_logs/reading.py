"""Reads logs of this node's ranks and of its msrun for who asks elsewhere, some bytes at a time.

Who asks names a rank and an attempt. Which files these are only this node knows, and no other file
is read. A thread reads them; of who follows a log the next look is not before he has the last.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from agent.hooks.rank_links import Loop, Timer
from agent.machine.file_thread import FileThread
from agent.nodes.run_messages import NO_NODE, NOW, LogAsked, LogRead
from agent.workers.worker import Worker
from worker_hooks.contract.layout import RunLayout

STREAMS = ("stdout", "stderr")
FILES = 1 + len(STREAMS)  # of a process: its log, and what torchrun's tree has of it
MOST_BYTES = 64 << 10  # of an answer
LAST_ANSWERS = 4  # at the end of an attempt, without another question
LOOK_S = 0.2  # between two looks whether a log has grown
WAIT_S = 2.0  # for that, until who follows hears that it has not
FORGET_S = 5.0  # after the last question nobody follows any more
MOST_READERS = 64
NOT_STARTED = "it has not been started yet"
NO_FILES = "--log-dir /dev/null is set there"
TOO_MANY = f"{MOST_READERS} logs are being read there"

Told = Callable[[LogRead], object]


class _Whose(NamedTuple):
    """A rank's present process."""

    rank: int
    local_rank: int
    began: int


_MSRUN = _Whose(-1, -1, 0)


class _Reading:
    """Who reads a log, and how far he is."""

    def __init__(self, asked: LogAsked, told: Told, asked_s: float) -> None:
        self.asked = asked
        self.told = told
        self.asked_s = asked_s
        self.timer: Timer | None = None  # until the next look

    def stop(self) -> None:
        """Look no more."""
        if self.timer is not None:
            self.timer.cancel()


class LogReader:
    """Answers questions. All but what its thread does is in msrun's loop."""

    def __init__(
        self, layout: RunLayout, workers: Callable[[], Iterable[Worker]], *, is_off: bool
    ) -> None:
        """Take the parts; nothing is asked before :meth:`attach`.

        Args:
            layout: of this node's files.
            workers: its ranks of the present attempt.
            is_off: no files are written.
        """
        self.record_id = layout.record_id
        """Of the run on this node."""
        self._layout = layout
        self._workers = workers
        self._is_off = is_off
        self._readings: dict[int, _Reading] = {}  # by the numbers of questions
        self._busy: set[int] = set()  # for which the thread is at work

    def attach(self, loop: Loop) -> None:
        """Answer in ``loop``."""
        self._loop = loop
        self._thread = FileThread(loop.call_soon_threadsafe)

    def ask(self, asked: LogAsked, told: Told) -> None:
        """``told`` takes the answer, and what is left as the attempt ends."""
        self._forget()
        number = asked.question
        if (old := self._readings.get(number)) is not None:
            old.stop()
        elif len(self._readings) >= MOST_READERS:
            told(LogRead(number, why_not=TOO_MANY))
            return
        self._readings[number] = reading = _Reading(asked, told, self._loop.time())
        self._look(reading)

    def rest(self) -> None:
        """The attempt is over here: tell who follows what is left, before that is told itself."""
        self._forget()
        for reading in tuple(self._readings.values()):
            whose = self._whose(reading.asked)
            if whose is not None and reading.asked.waits:
                self._tell_rest(reading, whose)

    def _tell_rest(self, reading: _Reading, whose: _Whose) -> None:
        for _ in range(LAST_ANSWERS):
            try:
                found = read_log(self._layout, whose, reading.asked)
            except OSError:  # it is told as it is asked for again, if ever
                return
            if found.why_not or found.following != NOW:
                return
            is_rest = not found.left and whose is not _MSRUN  # which has more to say
            self._tell(reading, found._replace(is_rest=is_rest))
            if not found.left:
                return

    def _forget(self) -> None:
        before_s = self._loop.time() - FORGET_S
        for number, reading in tuple(self._readings.items()):
            if reading.asked_s < before_s and number not in self._busy:
                reading.stop()
                del self._readings[number]

    def _whose(self, asked: LogAsked) -> _Whose | None:
        if asked.node != NO_NODE:
            return _MSRUN
        for each in self._workers():
            if each.rank == asked.rank:
                return _Whose(asked.rank, each.local_rank, each.began)
        return None

    def _look(self, reading: _Reading) -> None:
        asked = reading.asked
        if asked.question in self._busy:
            return
        whose = self._whose(asked)
        if whose is None or self._is_off:
            why = NO_FILES if self._is_off else NOT_STARTED
            answer = LogRead(asked.question, is_rest=self._is_off, why_not=why)
            self._tell(reading, answer)
            return
        self._busy.add(asked.question)
        read = partial(read_log, self._layout, whose, asked)
        self._thread.do(read, partial(self._on_read, reading, whose))

    def _on_read(self, reading: _Reading, whose: _Whose, found: LogRead | Exception) -> None:
        asked = reading.asked
        self._busy.discard(asked.question)
        newest = self._readings.get(asked.question)
        if newest is not reading:  # asked again meanwhile
            if newest is not None:
                self._look(newest)
        elif isinstance(found, OSError):
            why = f"it cannot be read there ({found.strerror})"
            self._tell(reading, LogRead(asked.question, why_not=why))
        elif isinstance(found, Exception):
            raise found
        elif self._whose(asked) != whose:  # its files have other names by now
            self._look(reading)
        elif asked.waits and _is_nothing(found) and self._is_patient(reading):
            reading.timer = self._loop.call_later(LOOK_S, self._look, reading)
        else:
            self._tell(reading, found)

    def _is_patient(self, reading: _Reading) -> bool:
        return self._loop.time() < reading.asked_s + WAIT_S

    def _tell(self, reading: _Reading, found: LogRead) -> None:
        reading.stop()
        if reading.asked.waits and not found.why_not:  # he is told the rest as well
            known = list(_known(reading.asked))
            known[found.file] = found.at + len(found.data)
            reading.asked = reading.asked._replace(attempt=found.began, known=tuple(known))
        else:
            self._readings.pop(reading.asked.question, None)
        reading.told(found)


def _is_nothing(found: LogRead) -> bool:
    """Whether there may be something later."""
    return not (found.data or found.why_not) and found.following == NOW


def _known(asked: LogAsked) -> tuple[int, ...]:
    """How far each file was read, whatever was said."""
    return tuple(max(0, at) for at in (*asked.known, *[0] * FILES)[:FILES])


def read_log(layout: RunLayout, whose: _Whose, asked: LogAsked) -> LogRead:
    """Some bytes that are new to who asks. Called in a thread.

    Raises:
        OSError: a file cannot be read.
    """
    paths, began, following = _files(layout, whose, asked.attempt)
    sizes = [_size(path) for path in paths]
    answer = LogRead(asked.question, began=began, following=following)
    if all(size is None for size in sizes):
        return answer._replace(why_not=f"there is no {paths[0].name} there")
    known = _known(asked)
    unread = [max(0, (size or 0) - at) for size, at in zip(sizes, known, strict=False)]
    if not any(unread):
        return answer
    # who follows gets of each, however fast another one grows
    file = unread.index(max(unread)) if asked.waits else unread.index(next(filter(None, unread)))
    data = _piece(paths[file], known[file], min(unread[file], MOST_BYTES))
    left = sum(unread) - len(data)
    return answer._replace(data=data, file=file, at=known[file], left=left)


def _files(layout: RunLayout, whose: _Whose, attempt: int) -> tuple[Sequence[Path], int, int]:
    """The files of the process that ran in an attempt.

    Returns:
        They, the attempt in which it began (of a past one that which was asked for), and that in
        which the next one did.
    """
    if whose is _MSRUN:
        return (layout.scheduler_log,), 0, NOW
    rank, began = whose.rank, whose.began
    if attempt < 0 or attempt >= began:
        streams = _streams(layout, whose, began)
        return (layout.worker_log(rank), *streams), began, NOW
    # a process's log has the number of the last attempt that it was in, its streams of the first
    ends = (each for each in range(attempt, began) if _is_ended(layout, rank, each))
    last = next(ends, None)
    begins = (each for each in range(attempt, -1, -1) if _has_tree(layout, whose, each))
    streams = _streams(layout, whose, next(begins, attempt))
    if last is not None:
        following = last + 1
    else:
        later = (each for each in range(attempt + 1, began) if _has_tree(layout, whose, each))
        following = next(later, began)
    log = layout.earlier_worker_log(rank, attempt if last is None else last)
    return (log, *streams), attempt, following


def _streams(layout: RunLayout, whose: _Whose, began: int) -> Iterator[Path]:
    return (layout.stream(began, whose.local_rank, name) for name in STREAMS)


def _is_ended(layout: RunLayout, rank: int, attempt: int) -> bool:
    return layout.earlier_worker_log(rank, attempt).exists()


def _has_tree(layout: RunLayout, whose: _Whose, attempt: int) -> bool:
    return any(path.exists() for path in _streams(layout, whose, attempt))


def _size(path: Path) -> int | None:
    """Of a file; ``None``: there is none. What is a link is none of msrun's logs."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _piece(path: Path, at: int, size: int) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags)
    try:
        return os.pread(file, size, at) if stat.S_ISREG(os.fstat(file).st_mode) else b""
    finally:
        os.close(file)
