"""Shows the workers' log files on the console, complete lines only, while they are written.

The workers write their files themselves and this thread only reads them, so a slow or stuck
terminal delays nothing but the view. The kernel reports when a file grew (inotify): no polling.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import resource
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from agent.records.log_view import LogView
from agent.records.repeats import Repeats

IN_MODIFY = 0x2  # linux/inotify.h
IN_NONBLOCK = 0o4000
CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20  # a longer line is shown in pieces of about this size
SPARED_FILES = 16  # descriptors reserved for the rest of the process
POLL_S = 0.2  # only where the kernel has no inotify watch left


def append(path: Path, data: bytes) -> None:
    """Add to a file.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        file.write(data)


class Follower:
    """One file, read again and again up to its present end."""

    def __init__(self, view: LogView, copy: Callable[[Path, bytes], None] = append) -> None:
        """Open the file; ``copy`` gets the lines that the filters pick.

        Raises:
            OSError: it cannot be opened.
        """
        self.view = view
        self._copy = copy
        self._file = os.open(view.path, os.O_RDONLY | os.O_CLOEXEC)
        self._partial = b""
        self._end: int | None = None  # where to stop reading

    def fileno(self) -> int:
        """Its descriptor."""
        return self._file

    def read(self, write: Callable[[int, bytes], None]) -> bool:
        """Show one chunk; False if there was nothing new.

        Raises:
            OSError: it cannot be read.
        """
        size = CHUNK_BYTES
        if self._end is not None:
            size = min(size, max(0, self._end - os.lseek(self._file, 0, os.SEEK_CUR)))
        chunk = os.read(self._file, size)
        if not chunk:
            return False
        if self.view.prefix is None:
            write(self.view.fd, chunk)
            return True
        lines = _lines(self._partial + chunk)
        self._partial = b""
        if lines and not lines[-1].endswith(b"\n") and len(lines[-1]) < MAX_LINE_BYTES:
            self._partial = lines.pop()
        self._show(lines, write)
        return True

    def hush(self) -> None:
        """Read what is there by now, and nothing that is written later. From another thread."""
        with contextlib.suppress(OSError):  # finished meanwhile
            self._end = os.fstat(self._file).st_size

    def finish(self, write: Callable[[int, bytes], None]) -> None:
        """Show an incomplete last line, and read no more."""
        if self._partial:
            self._show([self._partial], write)
        os.close(self._file)

    def _show(self, lines: list[bytes], write: Callable[[int, bytes], None]) -> None:
        prefix = self.view.prefix or b""
        ended = [line if line.endswith(b"\n") else line + b"\n" for line in lines]
        if self.view.fd >= 0 and ended:
            write(self.view.fd, b"".join(prefix + line for line in ended))
        if self.view.filtered is not None:
            picked = [line for line in ended if any(word in line for word in self.view.filters)]
            if picked:
                self._copy(self.view.filtered, b"".join(prefix + line for line in picked))


def _lines(data: bytes) -> list[bytes]:
    """Lines end at a newline only: a progress bar's carriage returns stay within their line."""
    pieces = data.split(b"\n")
    lines = [piece + b"\n" for piece in pieces[:-1]]
    return [*lines, pieces[-1]] if pieces[-1] else lines


def _ignore(path: Path, error: OSError, doing: str) -> None:
    """Report nothing: for files that others made."""


class Tail:
    """The thread that follows files."""

    def __init__(self, trouble: Callable[[Path, OSError, str], None] = _ignore) -> None:
        """``trouble`` is called, mostly by the thread, with what cannot be shown or written."""
        self._trouble = trouble
        self._lock = threading.Lock()
        self._wanted: list[tuple[list[Follower], frozenset[int] | None]] = []
        self._followers: list[Follower] = []
        self._newest: list[Follower] = []  # followed already, or as soon as the thread wakes up
        self._stopping = False
        self._closed: set[int] = set()  # descriptors whose reader is gone
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._files_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._inotify = _Inotify()
        self._repeats = Repeats(self._write)
        self._thread: threading.Thread | None = None
        self.progress = time.monotonic()

    def follow(self, views: list[LogView], ranks: frozenset[int] | None = None) -> None:
        """Follow these files from their beginning; those followed so far are shown to their end.

        ``ranks``: replace only the files of these ranks, and continue to follow the others.
        """
        # opened now, not by the thread: the next attempt renames the files
        followers = list(self._open(views))
        self._newest = [one for one in self._newest if _goes_on(one, ranks)] + followers
        if self._thread is None and followers:
            thread = threading.Thread(target=self._run, name="msrun-tail", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread is left for this user
                error = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                self._trouble(views[0].path, error, "show")
                for follower in followers:
                    follower.finish(self._write)
                return
            self._thread = thread
        with self._lock:
            self._wanted.append((followers, ranks))
        self._wake()

    def _open(self, views: Iterable[LogView]) -> Iterator[Follower]:
        for view in views:
            try:
                follower = Follower(view, self._copy)
                if 0 <= self._files_limit - SPARED_FILES <= follower.fileno():
                    follower.finish(self._write)
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # noqa: TRY301
                yield follower
            except FileNotFoundError:
                continue  # it is gone or was never made
            except OSError as error:
                self._trouble(view.path, error, "show")

    def hush(self) -> None:
        """Show what is there by now, and nothing that is written later, until the next follow()."""
        for follower in self._newest:
            follower.hush()

    def close(self, patience_s: float) -> bool:
        """Show the rest and stop; False if the console accepted nothing for ``patience_s``."""
        self.progress = time.monotonic()
        self._stopping = True
        self._wake()
        thread = self._thread
        while thread is not None and thread.is_alive():
            thread.join(max(0.01, self.progress + patience_s - time.monotonic()))
            if thread.is_alive() and time.monotonic() - self.progress > patience_s:
                return False
        return True

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            return  # it is about to wake up anyway

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(self._inotify.fd, select.POLLIN)
        wait_s: float | None = None
        while True:
            if self._inotify.blind:
                wait_s = min(POLL_S, wait_s or POLL_S)
            poll.poll(None if wait_s is None else math.ceil(wait_s * 1000))
            for fd in (self._wake_read, self._inotify.fd):
                _drain(fd)
            stopping = self._stopping  # before reading: what has been written by now is shown
            self._read_all()
            self._take_wanted()
            wait_s = self._repeats.release(time.monotonic())
            if stopping:
                self._end_all()
                return

    def _take_wanted(self) -> None:
        with self._lock:
            wanted, self._wanted = self._wanted, []
        for followers, ranks in wanted:
            kept = [one for one in self._followers if _goes_on(one, ranks)]
            self._end_all(kept)
            self._followers = kept + followers
            for follower in followers:
                self._inotify.watch(follower.fileno())
            self._read_all()

    def _read_all(self) -> None:
        """Show what is there, in turns: a file that never ends must not starve the others."""
        busy = True
        while busy:
            busy = any([self._read(follower) for follower in self._followers])  # noqa: C419  all

    def _read(self, follower: Follower) -> bool:
        try:
            return follower.read(self._shown(follower))
        except OSError as error:
            self._trouble(follower.view.path, error, "show")
            return False

    def _end_all(self, kept: Sequence[Follower] = ()) -> None:
        self._read_all()
        for follower in self._followers:
            if follower not in kept:
                follower.finish(self._shown(follower))
        self._repeats.end()
        self._followers = []

    def _shown(self, follower: Follower) -> Callable[[int, bytes], None]:
        """What shows its lines."""
        view = follower.view
        if not view.folds or view.fd < 0:
            return self._write
        return lambda _fd, data: self._repeats.take(view, data, time.monotonic())

    def _copy(self, path: Path, data: bytes) -> None:
        try:
            append(path, data)
        except OSError as error:
            self._trouble(path, error, "write")

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view and fd >= 0 and fd not in self._closed:
            try:
                view = view[os.write(fd, view) :]
                self.progress = time.monotonic()
            except BlockingIOError:
                select.select([], [fd], [])
            except OSError as error:
                if error.errno != errno.EINTR:
                    self._closed.add(fd)  # `msrun ... | head`: nobody reads, the job continues


def _goes_on(follower: Follower, ranks: frozenset[int] | None) -> bool:
    return ranks is not None and follower.view.rank not in ranks


class _Inotify:
    """The kernel's notice that a file was written to."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.inotify_init1(IN_NONBLOCK | os.O_CLOEXEC)
        self.blind = self.fd < 0  # max_user_instances reached: poll instead
        if self.blind:
            self.fd, _ = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def watch(self, fd: int) -> None:
        path = f"/proc/self/fd/{fd}".encode()
        if not self.blind and self._libc.inotify_add_watch(self.fd, path, IN_MODIFY) < 0:
            self.blind = True


def _drain(fd: int) -> None:
    try:
        while os.read(fd, CHUNK_BYTES):
            pass
    except BlockingIOError:
        return
