"""Copies the state into the agent's memory beside training, in a thread of its own.

So a rank whose part of the state no other rank holds, or a job whose ranks all die at once, loses
the steps since the newest copy, and no more. The copy is taken between a commit and the update
after it, like what is saved after a death; only that update waits for it. What the script changes
meanwhile outside of updates makes the copy fail, as it would make a dump fail.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.status_page import CommitRecord, Entry
from worker_hooks.guard.gate import Gate
from worker_hooks.guard.save import save
from worker_hooks.machine.free_memory import free_bytes
from worker_hooks.state.committed_state import CommittedState
from worker_hooks.storage.commit import private_head

log = logging.getLogger("msrun")

EXIT_S = 2.0  # for a copy that was given up, before the process ends: it stops within 4 MiB

ON_DEVICE = "the state is on an accelerator"
DONE = "training is over"
PASSED = "the rank had begun to change step {} before it was to be copied"
COMMITTED = "a step was committed while step {} was copied"

_PIECE = 4 << 20  # bytes


class _GivenUpError(Exception):
    """The copy was given up."""


class _NoRoomError(Exception):
    """No copy of this state will ever fit."""


class _Task:
    """One order to copy, and its files, which are closed with its answer."""

    def __init__(self, order: protocol.Copy, env: RankEnv) -> None:
        """Open the files at once: later the agent may mean others by the same numbers."""
        self.order = order
        self.env = env
        self.is_begun = False  # the thread will answer
        self.is_over = threading.Event()
        self.given_up = ""  # why
        self._opened: list[int] = []
        try:
            for path in (order.state, order.private):
                self._opened.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            self.close()
            raise
        self.state, self.private = self._opened

    def advance(self, _nbytes: int) -> None:
        """Some of it is done."""
        if self.given_up:
            raise _GivenUpError

    def close(self) -> None:
        """Close the files, once."""
        while self._opened:
            os.close(self._opened.pop())


class StateCopier:
    """The listener has it copy, and has it give up; each order is answered once.

    An update is blocked no longer than an order is its :attr:`_task`, which ends with the copy,
    however that ends.
    """

    def __init__(
        self,
        gate: Gate,
        source: CommittedState,
        send: Callable[[protocol.Message], None],
        why_not: Callable[[], str],
    ) -> None:
        """Copy nothing yet, and start nothing.

        Args:
            gate: between this and the main thread.
            send: called with each answer; never raises.
            why_not: why no step may be copied at present; empty: steps may.
        """
        self._gate = gate
        self._source = source
        self._send = send
        self._why_not = why_not
        self._last: _Task | None = None
        self.forget()

    def forget(self) -> None:
        """Start as new, in a forked child: its parent's thread does not exist there."""
        if self._last is not None:
            self._last.close()
        self._last = None
        self._lock = threading.Lock()  # taken before the gate's, never behind it
        self._orders: SimpleQueue[tuple[_Task, bool] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._task: _Task | None = None  # for which an update is, or will be, blocked

    @property
    def why_never(self) -> str:
        """Why no step of this state can ever be copied; empty: some can."""
        return "" if self._source.device is None else ON_DEVICE

    # --- the listener -----------------------------------------------------------------------------

    def copy(self, order: protocol.Copy, env: RankEnv, *, is_done: bool) -> None:
        """Have the state copied as of the order's step, and answered; does not wait.

        ``order``: what to copy, and to where.
        """
        self.give_up("another step was to be copied")
        never = self.why_never
        if why_not := never or self._why_not() or (DONE if is_done else ""):
            self._send(_failed(order, env, why_not, is_final=bool(never)))
            return
        try:
            task = _Task(order, env)
        except OSError as error:
            self._send(_failed(order, env, describe_os_error(error)))
            return
        try:
            self._start()
        except RuntimeError as error:  # no thread is left
            self._refuse(task, str(error))
            return

        def begin(is_there: bool) -> None:  # the gate's lock is held
            task.is_begun = True
            self._orders.put((task, is_there))

        with self._lock:  # until the gate knows it, nobody gives it up
            self._last = task
            is_ahead = self._gate.copy_at(order.step, begin)
            self._task = task if is_ahead else None
        if not is_ahead:
            self._refuse(task, PASSED.format(order.step))

    def give_up(self, why: str) -> None:
        """Copy no more, and let updates begin; does not wait for the thread."""
        with self._lock:
            task, self._task = self._task, None
            if task is None:
                return
            task.given_up = why
            self._gate.end_copy()  # the main thread begins it no more
        if not task.is_begun:
            self._refuse(task, why)

    def await_end(self) -> None:
        """Give up, and wait for the thread: it is not to read memory while the process ends."""
        self.give_up("the process exits")
        thread, self._thread = self._thread, None
        if thread is not None:
            self._orders.put(None)
            thread.join(EXIT_S)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="msrun-copy", daemon=True)
            thread.start()
            self._thread = thread

    def _refuse(self, task: _Task, why_not: str) -> None:
        task.close()
        task.is_over.set()
        self._send(_failed(task.order, task.env, why_not))

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while (order := self._orders.get()) is not None:
            task, is_there = order
            if not task.is_over.is_set():  # else it was ordered twice
                self._obey(task, is_there=is_there)

    def _obey(self, task: _Task, *, is_there: bool) -> None:
        began_s, order = time.thread_time(), task.order
        answer = _failed(order, task.env, PASSED.format(order.step))
        try:
            if is_there:
                answer = self._copied(task)
        except _GivenUpError:
            pass
        except OSError as error:
            answer = answer._replace(why_not=describe_os_error(error))
        except _NoRoomError as error:
            answer = answer._replace(why_not=str(error), is_final=True)
        except RuntimeError as error:
            answer = answer._replace(why_not=str(error)[:2000])
        except BaseException as error:
            log.exception("rank %d cannot copy step %d", task.env.rank, order.step)
            answer = answer._replace(why_not=repr(error)[:2000])
        finally:
            self._release(task)
            task.close()
            task.is_over.set()
        if task.given_up:
            answer = _failed(order, task.env, task.given_up)
        self._send(answer._replace(cpu_s=time.thread_time() - began_s))

    def _copied(self, task: _Task) -> protocol.Copied:
        source, order = self._source, task.order
        entries, record = self._private(order.step)
        epoch, batch = source.position(order.step)
        if why := _why_no_room(task, source.nbytes()[0] // order.parts):
            raise _NoRoomError(why)
        written = save(
            source,
            task.env,
            protocol.Save(
                dump_id=0,
                step=order.step,
                folder=str(Path("/proc/self/fd", str(task.state))),
                part=order.part,
                parts=order.parts,
                is_quick=True,
            ),
            None,
            task.advance,
        )
        assert isinstance(written, protocol.Written)
        # what changed before the first look at the versions has not moved them since
        if why := self._why_not() or source.why_changed():
            raise RuntimeError(why)
        if not self._release(task):
            raise RuntimeError(COMMITTED.format(order.step))
        private_nbytes = _put(task.private, private_head(entries, record), record.payload)
        os.ftruncate(task.private, private_nbytes)
        os.ftruncate(task.state, written.nbytes)  # last: to free memory takes its time
        return protocol.Copied(
            rank=task.env.rank,
            attempt=task.env.attempt,
            step=order.step,
            nbytes=written.nbytes,
            private_nbytes=private_nbytes,
            digest=written.digest,
            epoch=epoch,
            batch=batch,
            files=order.files,
        )

    def _private(self, step: int) -> tuple[tuple[Entry, ...], CommitRecord]:
        """The private state as of the commit, from the page.

        Raises:
            RuntimeError: the page has none.
        """
        page = self._source.page
        record = None if page is None else page.record(step)
        if page is None or record is None or not record.is_commit or record.has_early_buffers:
            raise RuntimeError(f"the status page has no commit of step {step}")
        return page.entries, record

    def _release(self, task: _Task) -> bool:
        """Let updates begin; whether nothing was committed or given up since the copy began."""
        with self._lock:
            if self._task is not task:
                return False
            self._task = None
            return self._gate.end_copy(task.order.step)


def _why_no_room(task: _Task, nbytes: int) -> str:
    """Why what all ranks here are about to copy, twice, does not fit into half of the free memory.

    Empty: it does. The kernel would kill processes to make room, and say no word before; and
    training may need more later.
    """
    growth = nbytes - os.fstat(task.state).st_size
    if growth <= 0:
        return ""
    wanted, free = 2 * growth * task.env.local_world_size, free_bytes()
    if free is None or wanted <= free // 2:
        return ""
    needed, half = wanted >> 20, free >> 21
    return f"copies need {needed} MiB, which is more than half of the free memory ({half} MiB)"


def _put(file: int, *contents: bytes) -> int:
    """Write from the file's beginning; the count of bytes."""
    at = 0
    for content in contents:
        left = memoryview(content)
        while left:
            done = os.pwrite(file, left[:_PIECE], at)
            left, at = left[done:], at + done
    return at


def _failed(
    order: protocol.Copy, env: RankEnv, why_not: str, *, is_final: bool = False
) -> protocol.Copied:
    return protocol.Copied(
        rank=env.rank,
        attempt=env.attempt,
        step=order.step,
        why_not=why_not,
        is_final=is_final,
        files=order.files,
    )
