"""Guards one rank's state: keeps the line to the agent, freezes the gate, saves when told to.

The listener is a thread of its own because the main thread may sit in a collective that a dead
peer never joins. It reads the live state only while the gate is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from worker_hooks import hold, protocol
from worker_hooks.beacon import Beacon
from worker_hooks.env import Told
from worker_hooks.gate import Gate, Stand
from worker_hooks.layout import DumpLayout
from worker_hooks.link import ANSWER_S, VERIFY_S, Link
from worker_hooks.page import Page
from worker_hooks.shard import Replica, digest, write

log = logging.getLogger("msrun")

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PROGRESS_S = 0.5
DYING_S = 1.0  # from a closed line to the end of the agent that closed it by dying
LOOK_S = 1.0
_PLACE_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EIO,
    errno.EFBIG,
    errno.ESTALE,
    errno.ENXIO,
}


_guarded: set[int] = set()  # this process, once the agent has welcomed it


class Source(Protocol):
    """Whose state is guarded."""

    @property
    def step(self) -> int:
        """The newest commit."""

    @property
    def page(self) -> Page | None:
        """Its status page."""

    def is_complete(self) -> bool:
        """Whether the update after the commit changed all that a step usually changes."""

    def is_touched(self) -> bool:
        """Whether live state was changed since the commit, by an optimizer or by the script."""

    def replica(self, step: int) -> Replica:
        """The replicated state as of the newest commit or, if torn but complete, of the next."""

    def position(self, step: int) -> tuple[int, int]:
        """Epoch and batch of that step, as file names count them."""

    def version(self) -> int:
        """A number that changes whenever a replicated tensor is changed."""

    def forget(self) -> None:
        """Write to no page any more."""


class Guard:
    """One rank's guard; without a line it guards nothing and costs nothing."""

    def __init__(
        self,
        told: Told,
        source: Source,
        ckpt_save_path: str,
        at_dump: Callable[[], None],
        alone: Callable[[Guard], None],
    ) -> None:
        """Prepare; :meth:`greet` connects.

        Args:
            told: who this process is.
            source: the state.
            ckpt_save_path: where it is saved, absolute; empty: nowhere.
            at_dump: called in the listener before anything is saved.
            alone: called in the listener when the agent is dead; saves, and ends the process.
        """
        self.gate = Gate()
        self.welcome: protocol.Welcome | None = None
        self.told = told
        self.source = source
        self.ckpt_save_path = ckpt_save_path
        self._at_dump = at_dump
        self._alone = alone
        self._link: Link | None = None
        self._beacon: Beacon | None = None
        self._listener: threading.Thread | None = None
        self._released = threading.Event()
        self.is_done = False  # training is over
        self.resumed_step = 0  # saved already, in the checkpoint this attempt began from
        self._pid = os.getpid()
        self._frozen: int | None = None  # the state's version, where it was torn but complete

    @property
    def is_on(self) -> bool:
        """Whether somebody will save this state."""
        return self._link is not None

    def greet(self, *, wants_resume: bool) -> protocol.Welcome | None:
        """Connect to the agent; ``None``: there is none.

        Raises:
            SystemExit: the agent refuses, exit code 2.
            ValueError: another guard of this process did so before.
        """
        if not self.told.hooks:
            return None
        if self._pid in _guarded:
            raise ValueError("this process has a TrainState already: register everything in one")
        try:
            link = Link(self.told.hooks)
        except OSError as error:
            log.warning("nothing guards rank %d: %s", self.told.rank, error)
            return None
        who = self.told.rank, self.told.attempt
        try:
            hello = protocol.Hello(*who, self._pid, self.ckpt_save_path, wants_resume)
            answer = link.ask(hello, VERIFY_S if wants_resume else ANSWER_S)
        except (OSError, protocol.ProtocolError) as error:
            log.warning("nothing guards rank %d: %s", self.told.rank, error)
            answer = None
        if not isinstance(answer, protocol.Welcome):  # e.g. a child of a rank: the rank is guarded
            link.close()
            return None
        if answer.refusal:
            log.error("%s", answer.refusal)
            raise SystemExit(2)
        self._link, self.welcome = link, answer
        _guarded.add(self._pid)
        os.register_at_fork(after_in_child=self._forget)
        return answer

    def register(self, page: int, step: int) -> None:
        """From now on the state can be saved. Called in the main thread; again for a new page."""
        if self._link is None:
            return
        try:
            self._link.send(protocol.Registered(self.told.rank, self.told.attempt, step), [page])
        except OSError:
            self._give_up("the line to msrun broke")
            return
        if self._listener is None:
            # the kernel would kill this thread's process with msrun, before it could save
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
            self._beacon = Beacon(self.told)
            self._listener = threading.Thread(target=self._listen, name="msrun", daemon=True)
            self._listener.start()
            hold.install(self)

    # --- the main thread ------------------------------------------------------------------------

    def raised(self, error: str) -> None:
        """Hold the main thread, which has come to its top, until nothing is to be saved."""
        if self._is_guarding() and not self._released.is_set():
            self.gate.note_raised()
            self._say(protocol.Raised(self.told.rank, self.told.attempt, error[:2000]))
            self._await_release()

    def leave(self) -> None:
        """Hold the main thread, which is about to exit, while its state may still be needed."""
        if self._is_guarding() and not self._released.is_set():
            self.gate.note_raised()
            self._say(protocol.Leaving(self.told.rank, self.told.attempt, self.is_done))
            self._await_release()

    def _is_guarding(self) -> bool:
        return self._link is not None and self._listener is not None and os.getpid() == self._pid

    def _await_release(self) -> None:
        """Every wait of the agent is bounded, and the listener ends this process if it is gone."""
        while not self._released.wait(LOOK_S):
            if self._listener is None or not self._listener.is_alive():
                return

    def _forget(self) -> None:
        """In a forked child: it is no rank."""
        if self._link is not None:
            self._link.forget()
            self._link = None
        if self._beacon is not None:
            self._beacon.close()
        self.source.forget()  # the page is the parent's
        self.gate = Gate()  # a thread that is not in the child may have held the other

    # --- the listener ---------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._link is not None
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while (message := self._link.listen()) is not None:
                match message:
                    case protocol.Freeze():
                        self._freeze(message)
                    case protocol.Save():
                        self._save(message)
                    case protocol.Release():
                        self._released.set()
                    case _:
                        log.warning("msrun said what only a newer version understands: %s", message)
            if self._link.is_agent_dead(DYING_S):
                self._alone(self)
        except Exception:
            log.exception("the guard of rank %d failed", self.told.rank)
        finally:
            self._give_up("")

    def _give_up(self, why: str) -> None:
        if why:
            log.warning("nothing guards rank %d any more: %s", self.told.rank, why)
        self._released.set()
        self.gate.open()

    def _say(self, message: protocol.Message) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):  # the listener hears the closed line
                self._link.send(message)

    def freeze(self, grace_s: float) -> tuple[int, bool, str]:
        """Close the gate: the step the state is whole as of, whether it is, and why not."""
        stand = self.gate.close(grace_s, self.source.is_complete, self.source.is_touched)
        step = self.source.step + (stand is Stand.UPDATED)
        self._frozen = self.source.version() if stand is Stand.UPDATED else None
        why = ""
        if stand is Stand.TORN:
            who = "an optimizer" if self.gate.is_torn else "the script itself"
            why = f"{who} began to update after step {step} and did not reach its commit"
        return step, stand is not Stand.TORN, why

    def _freeze(self, order: protocol.Freeze) -> None:
        step, is_whole, why = self.freeze(order.update_grace_s)
        who = self.told.rank, self.told.attempt
        self._say(protocol.Frozen(*who, order.dump_id, step, is_whole, why))

    def _save(self, order: protocol.Save) -> None:
        who = self.told.rank, self.told.attempt, order.dump_id
        try:
            self._at_dump()
            done = self.save(order, _Progress(lambda n: self._say(protocol.Progress(*who, n))))
        except OSError as error:
            is_place = error.errno in _PLACE_ERRORS
            self._say(protocol.SaveFailed(*who, _words(error), is_place))
        except Exception as error:
            log.exception("rank %d cannot save step %d", self.told.rank, order.step)
            self._say(protocol.SaveFailed(*who, repr(error)[:2000], is_place=False))
        else:
            self._say(done)

    def save(
        self, order: protocol.Save, advance: Callable[[int], None]
    ) -> protocol.Written | protocol.Digested:
        """Digest the replicated state, and write a part of it if that was ordered.

        Raises:
            OSError: the folder, or the disk below it.
            RuntimeError: the state changed meanwhile.
        """
        who = self.told.rank, self.told.attempt, order.dump_id
        replica = self.source.replica(order.step)  # may still copy what is small
        version = self.source.version() if self._frozen is None else self._frozen
        answer: protocol.Written | protocol.Digested
        if order.parts == 0:
            answer = protocol.Digested(*who, digest(replica, advance))
        else:
            file = DumpLayout.shard(self.told.rank, *self.source.position(order.step))
            path = Path(order.folder, file)
            path.parent.mkdir(exist_ok=True)
            done = write(path, replica, order.part, order.parts, advance)
            answer = protocol.Written(*who, file, done.nbytes, done.sha256, done.digest)
        if self.source.version() != version:
            raise RuntimeError("the state changed while it was read")
        return answer


class _Progress:
    """Tells about progress now and then."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._done = 0
        self._next = time.monotonic() + PROGRESS_S

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        if time.monotonic() > self._next:
            self._next = time.monotonic() + PROGRESS_S
            self._tell(self._done)


def _words(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}"
