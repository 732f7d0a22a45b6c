"""The gate between the main thread, which trains, and the listener thread, which may stop it.

The replicated state is *whole* from a commit until the next optimizer update begins, and *torn*
from there to the next commit. A closed gate lets no update begin; a held one keeps the main thread
at a commit. A Python signal handler could not do this: a rank that is blocked in a collective runs
its handlers up to 30 s late.

The main thread passes the gate several times a step, and takes no lock while nobody wants to stop
it. Each side first writes what it does and then reads what the other side wrote:

    main thread     ``_torn``, ``_committing`` = true, then reads ``needs_slow_path``
    listener        ``needs_slow_path`` = true, then reads ``_torn``, ``_committing``

In any order, at least one of the two sees the other (Dekker's algorithm). If the listener does, it
waits for the update or the commit. If the main thread does, it takes back what it wrote and takes
the slow path, under the lock. If both do, they wait for different things: the main thread for the
lock, which the listener does not hold while it waits. The algorithm needs the reads and writes of
each thread to happen in their order, as they do under the GIL. In a Python without a GIL the main
thread takes the slow path each time.

Where ranks hold different parts of the state, the first update of a step is voted on. A vote is
cast as an update begins, and is final: if all ranks have voted, this one makes its update though
the gate is closed. In a job on several nodes it waits for a clearance in the same place.

While the state is copied no update begins, and no vote is cast; everything else goes on. The copy
begins at the first pass of the gate behind its commit.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from enum import Enum

from worker_hooks.distributed.stacks import MainThread, waits_for_peers
from worker_hooks.guard.update_vote import Vote

STILL_S = 0.2  # a main thread that stays at one instruction for so long is blocked, not busy
LOOK_S = 0.02  # between two looks at it
CATCH_UP_S = 1.0  # for a rank that waits for peers: what it needs is on its way, or is lost

_DEVICE_LOOK_S = 0.0002  # a device has a whole forward and backward to do meanwhile

_IS_FREE_THREADED = not getattr(sys, "_is_gil_enabled", lambda: True)()


class EjectedError(BaseException):
    """Takes the main thread out of the training function, to enter it again.

    No ``Exception``: a script that handles failures itself is not to handle this one.
    """


class FreezeResult(Enum):
    """What the state was when the gate was closed."""

    WHOLE = "whole"  # no update since the commit
    UPDATED = "updated"  # the update is complete; the main thread is blocked before its commit
    TORN = "torn"


class Gate:
    """Decides whether the main thread may pass. All times are seconds."""

    __slots__ = (
        "_arrived",
        "_changed",
        "_closed",
        "_closed_at",
        "_committing",
        "_copy",
        "_copying",
        "_ejecting",
        "_exiting",
        "_held",
        "_hold_at",
        "_holding",
        "_is_complete",
        "_raised",
        "_step",
        "_telling",
        "_torn",
        "_updates",
        "_updates_blocked",
        "_voting",
        "_waived",
        "needs_slow_path",
        "vote",
    )

    def __init__(self, step: Callable[[], int] = lambda: 0) -> None:
        """Open. ``step``: the newest commit; called by either thread."""
        self._step = step
        self.reset()

    def reset(self) -> None:
        """Start as new, in a forked child: a thread that does not exist there may hold the lock."""
        self._changed = threading.Condition()
        self.needs_slow_path = _IS_FREE_THREADED
        """False: there is nothing to :meth:`pause` for. May be read at any time, without a lock."""
        self._closed = False
        self._closed_at = 0  # the commit that the main thread may still reach
        self._holding = False  # at the next commit
        self._hold_at: int | None = None  # the commit at which the main thread is held
        self._arrived: Callable[[], None] | None = None  # the main thread calls it there, once
        self._exiting = False
        self._ejecting = False
        self._updates_blocked = False
        self._copy: tuple[int, Callable[[bool], None]] | None = None  # its step, and what begins it
        self._copying = False  # no update begins
        self._held = False
        self._raised = False
        self._updates = 0  # under way
        self._torn = False
        self._committing = False
        self._telling = False  # the commit is made, and the agent is yet to be told what it shows
        self._is_complete = False  # reported as UPDATED: what is torn is complete
        self._voting = False  # the main thread is about to cast its vote
        self._waived = 0  # the commit that a peer has reached, while no msrun decides
        self.vote: Vote | None = None
        """On each update, if ranks hold different parts of the state, or are on several nodes."""

    # --- the main thread ------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Call before an optimizer changes anything; waits while the gate is closed.

        Raises:
            EjectedError: the main thread must return from the training function.
        """
        was_torn = self._torn
        if self.vote is not None and not was_torn:
            self._hold_vote(self.vote)
        self._updates += 1  # first: torn without an update under way means that one has ended
        self._torn = True
        if self.needs_slow_path:
            self._begin_update_slowly(was_torn)

    def _hold_vote(self, vote: Vote) -> None:
        """Cast this rank's vote unless the gate is closed, and wait for those of others."""
        step = self._step() + 1
        self._voting = True
        try:  # a signal may raise anywhere here, and the listener waits for the end of it
            may_vote = not self.needs_slow_path
            if may_vote:
                vote.cast(step)
        finally:
            self._voting = False
        if not may_vote:
            with self._changed:
                self._changed.notify_all()
                while self._is_update_blocked(
                    was_torn=False, has_voted=False
                ) or self._must_not_vote(vote, step):
                    self._changed.wait()
                if self._ejecting:
                    raise EjectedError
                vote.cast(step)
        vote.wait(step, self._must_not_wait, lambda: self._closed or self._holding)

    def _must_not_wait(self) -> bool:
        """Whether the update is to begin without the others, or follows one that they have made."""
        self.raise_if_ejected()
        return self._exiting or self._step() < max(self._closed_at, self._waived)

    def _begin_update_slowly(self, was_torn: bool) -> None:
        with self._changed:
            self._updates -= 1
            self._torn = was_torn
            self._changed.notify_all()
            while self._is_update_blocked(was_torn=was_torn, has_voted=self.vote is not None):
                self._changed.wait()
            if self._ejecting:
                raise EjectedError
            self._updates += 1
            self._torn = True

    def _is_update_blocked(self, *, was_torn: bool, has_voted: bool) -> bool:
        """Whether the main thread, in front of an update, is to wait. The lock is held."""
        self._look_at_copy(is_late=was_torn or has_voted)
        if self._ejecting:
            return False
        # the second optimizer of a step may pass, unless the step was reported as complete
        is_closed = self._is_closed() and (self._is_complete or not was_torn)
        return self._updates_blocked or self._copying or is_closed

    def _must_not_vote(self, vote: Vote, step: int) -> bool:
        """Whether peers count on no vote: a rank that has not voted as its gate closes will not."""
        return self._closed and not self._ejecting and vote.is_needed(step)

    def _look_at_copy(self, *, is_late: bool) -> None:
        """In the main thread: begin the copy that was ordered, if it is time. The lock is held.

        Args:
            is_late: the update after the newest commit has begun, or this rank has voted for it.
        """
        if self._copy is None or self._step() < self._copy[0]:
            return
        step, begin = self._copy
        is_there = self._step() == step and not is_late
        # if a signal raises in the middle, the next pass does all of this again
        self._copying = is_there
        begin(is_there)
        self._copy = None
        self._lower()

    def end_update(self) -> None:
        """Call after an optimizer's update."""
        self._updates -= 1
        if self.needs_slow_path:
            self._notify()

    def commit(self, record: Callable[..., None], *args: object, tells: bool = False) -> None:
        """Make the step a commit.

        Args:
            record: writes it down while the listener does not read.
            args: of ``record``.
            tells: :meth:`told` is called once the agent has been told what the commit shows.
        """
        self._committing = True
        self._telling = tells  # first: whoever sees the commit sees this, too
        if self.needs_slow_path:
            self._committing = False
            with self._changed:
                record(*args)
                self._torn = False
                self._updates = 0
                self._changed.notify_all()
            return
        try:
            record(*args)
            self._torn = False
            self._updates = 0  # an update that failed did not report its end
        finally:
            self._committing = False
            if self.needs_slow_path:  # by now
                self._notify()  # type: ignore[unreachable]

    def told(self) -> None:
        """The agent has been told what the newest commit shows."""
        self._telling = False
        if self.needs_slow_path:
            self._notify()

    def pause(self) -> bool:
        """At a boundary: wait as long as the main thread is to be held.

        Returns:
            Whether it is to exit.

        Raises:
            EjectedError: it must return from the training function, and enter it again.
        """
        return self.needs_slow_path and self._pause_slowly()

    def _pause_slowly(self) -> bool:
        while (arrived := self._wait()) is not None:
            arrived()  # without the lock: it may send, and the listener must not wait for that
        if self._ejecting:
            raise EjectedError
        return self._exiting

    def _wait(self) -> Callable[[], None] | None:
        """Wait until the main thread may continue, or is where it was awaited: whom to call."""
        with self._changed:
            self._look_at_copy(is_late=self._torn)
            while not (self._exiting or self._ejecting) and (
                self._holding or self._is_closed() or self._has_arrived()
            ):
                if self._arrived is not None and self._has_arrived():
                    arrived, self._arrived = self._arrived, None
                    return arrived
                self._held = True
                self._changed.notify_all()
                self._changed.wait()
                self._look_at_copy(is_late=self._torn)
            self._held = False
            return None

    def _is_closed(self) -> bool:
        return self._closed and self._step() >= self._closed_at

    def _has_arrived(self) -> bool:
        return self._hold_at is not None and self._step() >= self._hold_at

    def raise_if_ejected(self) -> None:
        """Call while waiting for other ranks by other means than a collective.

        Raises:
            EjectedError: the main thread must return from the training function.
        """
        if self._ejecting:
            raise EjectedError

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Wait for an accelerator in front of an update; nothing is torn meanwhile.

        ``is_ready``: whether the wait is over; never waits itself.

        Raises:
            EjectedError: the main thread must return from the training function.
        """
        while not is_ready():
            self.raise_if_ejected()
            time.sleep(_DEVICE_LOOK_S)

    def reenter(self) -> None:
        """The main thread has returned from the training function; no update is under way."""
        with self._changed:
            self._ejecting = self._raised = self._torn = self._telling = False
            self.vote = None  # the new peers have a board of their own
            self._updates = 0
            self._lower()
            self._changed.notify_all()

    def note_raised(self) -> None:
        """An exception ended the main thread's training function: no commit will follow."""
        with self._changed:
            self._raised = True
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- the listener ---------------------------------------------------------------------------

    @property
    def is_torn(self) -> bool:
        """Whether an update began since the last commit."""
        return self._torn

    @property
    def is_held(self) -> bool:
        """Whether the main thread waits at a commit, or an exception has ended its training."""
        return self._held or self._raised

    @property
    def is_waiting(self) -> bool:
        """Whether the main thread waits at a commit."""
        return self._held

    @property
    def is_stopping(self) -> bool:
        """Whether the main thread is to be held at a certain commit, or to exit."""
        return self._hold_at is not None or self._exiting

    def hold(self) -> None:
        """Hold the main thread at its next commit; updates continue until then."""
        with self._changed:
            self._holding = self.needs_slow_path = True

    def follow(self, step: int) -> None:
        """A peer has reached this commit: nobody is waited for on the way to it."""
        self._waived = step

    def hold_next(self, is_over: Callable[[], bool]) -> int:
        """Hold the main thread at the end of its present step, and return that step's number.

        The flag is set before the step is read, so the main thread cannot pass the end of that
        step: either it sees the flag there, or its commit preceded the read, and the step is a
        later one.

        Args:
            is_over: whether no step will follow; called after the flag is set. The step is then the
                newest commit.
        """
        with self._changed:
            self.needs_slow_path = True
            self._hold_at = step = self._step() + (not is_over())
            self._arrived = None
            self._changed.notify_all()
            return step

    def hold_at(self, step: int, arrived: Callable[[], None] | None = None) -> None:
        """Let the main thread continue to this commit, and hold it there.

        Args:
            step: not one that the main thread has passed.
            arrived: called once by the main thread when it is held there.
        """
        with self._changed:
            self.needs_slow_path = True
            self._hold_at = step
            self._arrived = arrived
            self._changed.notify_all()

    def claim_arrival(self) -> bool:
        """Whether ``arrived`` was not called yet; the main thread will not call it any more."""
        with self._changed:
            is_open, self._arrived = self._arrived is not None, None
            return is_open

    def exit(self) -> None:
        """Let the main thread continue, for good, with the order to exit."""
        with self._changed:
            self.needs_slow_path = self._exiting = True
            self._open()

    def eject(self) -> None:
        """Take the main thread out of the training function; let no update begin before `open`."""
        with self._changed:
            self.needs_slow_path = self._ejecting = self._updates_blocked = True
            self._open()

    def block_updates(self) -> None:
        """Let no update begin before :meth:`open`; everything else continues."""
        with self._changed:
            self.needs_slow_path = self._updates_blocked = True

    def open(self) -> None:
        """Let the main thread continue; an order to exit still counts."""
        with self._changed:
            self._updates_blocked = False
            self._open()
            self._lower()

    def _open(self) -> None:
        if self.vote is not None:
            self.vote.shut(is_shut=False)
        self._closed = self._holding = self._is_complete = False
        self._hold_at = self._arrived = None
        self._changed.notify_all()

    def _lower(self) -> None:
        """Spare the main thread the slow path, if nothing needs it any more. The lock is held."""
        self.needs_slow_path = (
            self._closed
            or self._holding
            or self._hold_at is not None
            or self._exiting
            or self._ejecting
            or self._updates_blocked
            or self._copy is not None
            or self._copying
            or _IS_FREE_THREADED
        )

    def copy_at(self, step: int, begin: Callable[[bool], None]) -> bool:
        """Have the state copied as of this commit, before the next update.

        Args:
            begin: called once by the main thread, under the gate's lock, with whether it is there;
                then no update begins before :meth:`end_copy`. Otherwise it has passed the commit.
                A signal that raises there may have it called again.

        Returns:
            Whether the main thread has yet to pass; else ``begin`` is not called.
        """
        with self._changed:
            self._copy, self._copying, self.needs_slow_path = (step, begin), False, True
            # in this order: with the commit over, it is the next update that tears the state
            now = self._step()
            has_begun = now == step and not self._committing and self._torn
            if now > step or has_begun:
                self._copy = None
                self._lower()
            self._changed.notify_all()
            return self._copy is not None

    def end_copy(self, step: int | None = None) -> bool:
        """The copy is done, or given up: updates may begin. Any thread may call this.

        ``step``: the one that was copied, if any.

        Returns:
            Whether no other step was committed meanwhile.
        """
        with self._changed:
            self._copy, self._copying = None, False
            self._lower()
            self._changed.notify_all()
            return self._step() == step

    def close(
        self,
        grace_s: float,
        is_complete: Callable[[], bool],
        is_touched: Callable[[], bool] = lambda: False,
        newest: int = 0,
    ) -> FreezeResult:
        """Let no update begin; let one that is under way reach its commit, if it can.

        May be called again while the gate is closed: the main thread may then go on to ``newest``.

        Args:
            grace_s: how long to wait for that.
            is_complete: whether all that a step usually changes has changed; called when the main
                thread is blocked after an update, in a collective that a dead rank never joins.
            is_touched: whether the script itself has changed the state since the commit.
            newest: the newest commit of any rank, which this one may reach, too. Who reached it
                had all it needed of the others. There may be several in between: one that only
                the script made, at the end of training, needs nothing of others.
        """
        began = time.monotonic()
        with self._changed:
            self._closed = self.needs_slow_path = True
            self._arrived = None  # the freeze is answered instead
            is_voted, step = self._is_voted(grace_s), self._step()
            # a commit that no rank has reached may be one that a dead rank had no part in
            self._let_on(max(newest, step + 1 if is_voted else 0))
            try:
                if is_voted:
                    self._let_update(step + 1, began + grace_s)
                self._catch_up(newest, began, grace_s)
                result = self._settled(began + grace_s, is_complete, is_touched)
                self._await_told(began + grace_s)
                return result
            finally:
                self._closed_at = 0

    def _let_on(self, newest: int) -> None:
        """Let the main thread go on to this commit, if it is behind it. The lock is held."""
        self._closed_at = newest
        if self._step() >= newest:
            return
        if self._hold_at is not None:  # for a graceful exit, which this interrupts
            self._hold_at = max(self._hold_at, newest)
        self._held = self._is_complete = False
        self._changed.notify_all()  # it may have found the gate closed

    def _settled(
        self, until_s: float, is_complete: Callable[[], bool], is_touched: Callable[[], bool]
    ) -> FreezeResult:
        """Wait until no update is under way, or can be seen to stay so. The lock is held."""
        main, has_waited = MainThread(), False
        while self._committing or self._torn or is_touched():
            is_still = main.still_s() > STILL_S or self._raised
            if is_still and not self._committing and self._updates == 0 and is_complete():
                self._is_complete = True
                return FreezeResult.UPDATED
            # a main thread that found the gate closed needs the lock to take its update back
            is_vain = self._held or time.monotonic() > until_s
            if self._raised or (is_vain and has_waited):
                return FreezeResult.TORN
            self._changed.wait(LOOK_S)
            has_waited = True
        return FreezeResult.WHOLE

    def _await_told(self, until_s: float) -> None:
        """Wait until the main thread has told what its commit shows. The lock is held.

        At the first commits that says whether this rank may save for one that died.
        """
        while self._telling and not self._raised and time.monotonic() < until_s:
            self._changed.wait(LOOK_S)

    def _is_voted(self, grace_s: float) -> bool:
        """Whether all ranks make the update of the step under way. The lock is held."""
        vote = self.vote
        if vote is None or self._torn:
            return False
        began = time.monotonic()
        while self._voting and time.monotonic() < began + grace_s:  # it will not vote, or has
            self._changed.wait(LOOK_S / 10)
        vote.shut(is_shut=True)
        step, until_s = self._step() + 1, time.monotonic() + min(grace_s, CATCH_UP_S)
        while (result := vote.result(step)) is None and time.monotonic() < until_s:
            self._changed.wait(LOOK_S / 10)
        return result is True

    def _let_update(self, step: int, until_s: float) -> None:
        """Let the main thread make the update of this step, and commit it. The lock is held.

        Returns as well if it has made the update, and is blocked before its commit.
        """
        main = MainThread()
        while not (self._step() >= step or self._raised or time.monotonic() > until_s):
            is_updated = self._torn and self._updates == 0 and not self._committing
            if is_updated and main.still_s() > STILL_S:
                return
            self._changed.wait(LOOK_S)

    def _catch_up(self, newest: int, began_s: float, grace_s: float) -> None:
        """Let the main thread reach a commit that a peer has reached. The lock is held.

        That peer had all it needs of the others. The same was sent to this rank; or a peer is gone,
        and this rank raises, or waits for it in vain. A main thread that waits for nobody is on its
        way, be it in a validation or asleep: else the rank would resume with the randomness and
        the buffers of a step before, so it has the whole grace.
        """
        main = MainThread()
        while not (self._step() >= newest or self._raised or self._held or self._updates_blocked):
            took_s = time.monotonic() - began_s
            is_doubtful = main.still_s() > STILL_S or took_s > CATCH_UP_S
            if took_s > grace_s or (is_doubtful and waits_for_peers()):
                return
            self._changed.wait(LOOK_S)
