"""The ranks of a launched function, as their parent sees them: start, wait, show, end."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from msrun.function.failure import RankFailure
from msrun.function.rank import LENGTH, Ends, Outcome, serve

CHUNK = 1 << 16
LONGEST = 1 << 16  # a line that is shown in one piece
SETTLE_S = 2.0  # so long a rank that lost a peer waits for the peer's own failure to be seen
_BOOT = (
    "import json, sys; sys.path[:], words = json.loads(sys.argv[1]); "
    "from msrun.function.rank import Ends, spawned; "
    "spawned(words[0], words[1], Ends(*words[2]), words[3])"
)


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Let Ctrl-C wait: a process must be known first, and a hook of a fork swallows exceptions."""
    before, came = signal.getsignal(signal.SIGINT), list[tuple[Any, ...]]()
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda *seen: came.append(seen))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])


class Process:
    """One rank: its process, its answer, and the lines that it has begun."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = 0  # 0: not started
        self.ends: list[int] = []  # of the parent: answer, out, err
        self.watch = -1  # readable once it has ended
        self.is_unknown = False  # it had ended, and was waited for, before it could be watched
        self.said = bytearray()  # of its answer
        self.answer: Outcome | None = None
        self.lines = {1: b"", 2: b""}
        self.has_ended = False
        self.exit_code: int | None = None  # None: not ended, or not known

    @property
    def is_alive(self) -> bool:
        """Whether it is to be waited for."""
        return bool(self.pid) and not self.has_ended

    @property
    def is_ours(self) -> bool:
        """Whether nobody has waited for it: else its id may be that of another process."""
        if self.is_unknown:
            return False
        if self.watch < 0:
            return self.is_alive
        try:
            signal.pidfd_send_signal(self.watch, 0)
        except ProcessLookupError:
            return False
        return self.is_alive

    def close(self) -> None:
        """Close what this process has open for it."""
        for fd in filter(lambda fd: fd >= 0, (*self.ends, self.watch)):
            os.close(fd)

    def read_answer(self) -> None:
        """Take in what it came to, unless it died before.

        Raises:
            Exception: its result cannot be unpickled here.
        """
        size = int.from_bytes(self.said[:LENGTH], "big")
        if size and len(self.said) >= LENGTH + size:
            # written by our own child
            self.answer = Outcome(*pickle.loads(self.said[LENGTH:]))  # noqa: S301


class Processes:
    """All ranks; a context that leaves no process and no descriptor behind."""

    def __init__(self, environs: Sequence[Mapping[str, str]], grace_s: float) -> None:
        """Take the ranks' variables, and how long a rank has between SIGTERM and SIGKILL."""
        self._environs = environs
        self._grace_s = grace_s
        self._ranks = [Process(rank) for rank in range(len(environs))]
        self._selector = selectors.DefaultSelector()
        self._failures: list[RankFailure] = []
        self._unread = set[int]()  # of stdout and stderr: who reads it is gone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End what lives; a second interruption ends it at once."""
        try:
            self._signal(signal.SIGTERM)
            self._turn_until(lambda: False, time.monotonic() + self._grace_s)
        finally:
            self._signal(signal.SIGKILL)
            try:
                self._turn_until(lambda: False, None)
            finally:
                for process in self._ranks:
                    if process.is_alive:  # its end cannot be watched, or taking it in failed
                        with contextlib.suppress(ChildProcessError):
                            os.waitpid(process.pid, 0)
                    process.close()
                self._selector.close()

    def fork(self, call: Callable[[], Any]) -> None:
        """Start all ranks as copies of this process."""
        with _interrupted_later():
            for process in self._ranks:
                parent = os.getpid()
                with self._opened(process) as theirs:
                    with warnings.catch_warnings():  # Python 3.12: of threads; launch() names them
                        warnings.simplefilter("ignore", DeprecationWarning)
                        process.pid = os.fork()
                    if not process.pid:
                        for each in self._ranks:
                            each.close()
                        serve(call, theirs, self._environs[process.rank], parent)
                self._started(process)

    def spawn(self, function: bytes) -> None:
        """Start all ranks in fresh interpreters; ``function``: pickled, with its arguments."""
        from multiprocessing import spawn

        preparation = spawn.get_preparation_data("rank")
        preparation.pop("authkey", None)  # refuses to be pickled, and serves no one here
        payload = os.memfd_create("msrun-launch", 0)
        try:
            with open(payload, "wb", closefd=False) as file:
                pickle.dump((preparation, [dict(each) for each in self._environs], function), file)
            with _interrupted_later():
                for process in self._ranks:
                    with self._opened(process) as theirs:
                        for fd in theirs:
                            os.set_inheritable(fd, True)
                        told = json.dumps([sys.path, [payload, process.rank, theirs, os.getpid()]])
                        words = [sys.executable, "-c", _BOOT, told]
                        streams = [
                            (os.POSIX_SPAWN_DUP2, fd, to)
                            for to, fd in ((1, theirs.out), (2, theirs.err))
                        ]
                        # threads of torch are counted when it is imported
                        environ = {**os.environ, **self._environs[process.rank]}
                        process.pid = os.posix_spawn(
                            sys.executable, words, environ, file_actions=streams
                        )
                    self._started(process)
        finally:
            os.close(payload)

    def wait(self, timeout_s: float | None) -> tuple[list[Process], list[RankFailure]]:
        """Wait until all ranks have ended, or one has failed; the ranks that live, and failures."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._turn_until(lambda: bool(self._failures), until)
        if self._failures:  # it may have lost a peer whose end is not seen yet
            settled = time.monotonic() + SETTLE_S
            self._turn_until(self._is_explained, settled)
        return [process for process in self._ranks if process.is_alive], list(self._failures)

    def values(self) -> dict[int, Any]:
        """What the ranks returned; they have all ended well."""
        return {each.rank: each.answer.value for each in self._ranks if each.answer is not None}

    def _is_explained(self) -> bool:
        return any(not failure.is_consequence for failure in self._failures)

    @contextlib.contextmanager
    def _opened(self, process: Process) -> Iterator[Ends]:
        """Its pipes; the ends that it writes into are closed here at last, also if it cannot be."""
        theirs = list[int]()
        try:
            for _ in range(3):
                reads, writes = os.pipe()
                process.ends.append(reads)
                theirs.append(writes)
                os.set_blocking(reads, False)
            yield Ends(*theirs)
        finally:
            for fd in theirs:
                os.close(fd)

    def _started(self, process: Process) -> None:
        try:
            process.watch = os.pidfd_open(process.pid)
        except ProcessLookupError:  # it has ended, and another part of the program waited for it
            process.is_unknown = True
            process.watch, writes = os.pipe()
            os.close(writes)  # so that its end is seen at once
        for index, fd in enumerate(process.ends):
            self._selector.register(fd, selectors.EVENT_READ, (process, index))
        self._selector.register(process.watch, selectors.EVENT_READ, (process, -1))

    def _turn_until(self, is_done: Callable[[], bool], until: float | None) -> None:
        """Take in what comes until ``is_done``, or no rank lives, or it is late."""
        while any(each.is_alive and each.watch >= 0 for each in self._ranks) and not is_done():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            for key, _ in self._selector.select(left):
                process, index = key.data
                if not process.is_alive:  # all that it wrote was taken in
                    continue
                if index < 0:
                    self._ended(process)
                else:
                    self._read(process, index)

    def _read(self, process: Process, index: int) -> bool:
        """Take in a part of what a rank wrote; whether there may be more."""
        try:
            chunk = os.read(process.ends[index], CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            with contextlib.suppress(KeyError):
                self._selector.unregister(process.ends[index])
        elif index == 0:
            process.said += chunk
        else:
            self._show(process, index, chunk)
        return bool(chunk)

    def _show(self, process: Process, index: int, chunk: bytes, *, is_last: bool = False) -> None:
        *lines, rest = (process.lines[index] + chunk).split(b"\n")
        if rest and (is_last or len(rest) > LONGEST):
            lines, rest = [*lines, rest], b""
        process.lines[index] = rest
        stream = sys.stdout if index == 1 else sys.stderr
        if not lines or stream is None or index in self._unread:
            return
        said = [f"[rank {process.rank}]: {line.decode(errors='replace')}\n" for line in lines]
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            stream.write("".join(said).encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except (OSError, ValueError):  # its reader is gone, or it is closed; ranks end all the same
            self._unread.add(index)

    def _ended(self, process: Process) -> None:
        """Take in a rank's end, its last words first; nothing that it started outlives it."""
        if process.is_ours:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # SIGCHLD has a handler, or is ignored
            process.exit_code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        process.has_ended = True
        self._selector.unregister(process.watch)
        for index in range(3):
            while self._read(process, index):
                pass
            with contextlib.suppress(KeyError):
                self._selector.unregister(process.ends[index])
        for index in (1, 2):
            self._show(process, index, b"", is_last=True)
        self._judge(process)

    def _judge(self, process: Process) -> None:
        """Note a failure."""
        code = process.exit_code
        try:
            process.read_answer()
        except Exception as error:  # noqa: BLE001  what a user's class raises
            why = f"a result that this process cannot read: {error!r}"
            self._failures.append(RankFailure(process.rank, code, why))
            return
        answer = process.answer
        if code is None and answer is not None:
            code = answer.exit_code
        if answer is None or code is None or code < 0:
            self._failures.append(RankFailure(process.rank, code))
        elif answer.exit_code:
            words = (answer.error, answer.traceback, answer.origin)
            self._failures.append(RankFailure(process.rank, code, *words))

    def _signal(self, signum: int) -> None:
        for process in self._ranks:
            if process.is_ours:
                try:
                    os.killpg(process.pid, signum)
                except ProcessLookupError:  # it does not lead a session yet
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signum)
