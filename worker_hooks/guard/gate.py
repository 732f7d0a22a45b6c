"""The gate between the main thread, which trains, and the listener thread, which may stop it.

The replicated state is *whole* from a commit until the next optimizer update begins, and *torn*
from there to the next commit. A closed gate lets no update begin; a held one keeps the main thread
at a commit. A Python signal handler could not do this: a rank that is blocked in a collective runs
those up to 30 s late.

The main thread comes by several times a step and takes no lock while nobody wants anything of it.
Each side writes first what it does and looks then at what the other side wrote:

    main thread     ``_torn``, ``_committing`` = true, then looks at ``is_shut``
    listener        ``is_shut`` = true, then looks at ``_torn``, ``_committing``

Whatever the order, one of the two sees the other (Dekker's handshake). If the listener does, it
waits for the update or the commit; if the main thread does, it takes back what it wrote and goes
the slow way, under the lock; if both do, they wait for different things: the main thread for the
lock, which the listener does not hold while it waits. The handshake needs each thread's reads and
writes to happen in their order, as they do under the GIL. In a Python without one the gate is
always shut: the main thread goes the slow way each time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from types import FrameType

STILL_S = 0.2  # a main thread that stands at one instruction for so long is blocked, not busy
LOOK_S = 0.02  # between two looks at it
CATCH_UP_S = 1.0  # for what takes milliseconds where processors are free

_IS_FREE_THREADED = not getattr(sys, "_is_gil_enabled", lambda: True)()


class EjectedError(BaseException):
    """Takes the main thread out of the training function, to enter it again.

    No ``Exception``: a script that answers failures itself is not to answer this one.
    """


class Stand(Enum):
    """Where the main thread was found when the gate was closed."""

    WHOLE = "whole"  # no update since the commit
    UPDATED = "updated"  # the update is done, the main thread stands still before its commit
    TORN = "torn"


class Gate:
    """Who may pass. All times are seconds."""

    __slots__ = (
        "_arrived",
        "_barred",
        "_changed",
        "_closed",
        "_closed_at",
        "_committing",
        "_ejecting",
        "_held",
        "_holding",
        "_is_settled",
        "_leaving",
        "_raised",
        "_stay_at",
        "_step",
        "_torn",
        "_updates",
        "is_shut",
    )

    def __init__(self, step: Callable[[], int] = lambda: 0) -> None:
        """Open.

        Args:
            step: the newest commit; asked by either thread.
        """
        self._step = step
        self.forget()

    def forget(self) -> None:
        """Be as new, in a forked child: a thread that is not in it may have held the lock."""
        self._changed = threading.Condition()
        self.is_shut = _IS_FREE_THREADED
        """False: there is nothing to :meth:`pause` for. May be read at any time, without a lock."""
        self._closed = False
        self._closed_at = 0  # the commit that the main thread may yet come to
        self._holding = False
        self._stay_at: int | None = None  # the commit the main thread stays at
        self._arrived: Callable[[], None] | None = None  # called by it, once, when it is there
        self._leaving = False
        self._ejecting = False
        self._barred = False
        self._held = False
        self._raised = False
        self._updates = 0  # under way
        self._torn = False
        self._committing = False
        self._is_settled = False  # called updated: what is torn is complete

    # --- the main thread ------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Before an optimizer touches anything; waits while the gate is closed.

        Raises:
            EjectedError: the main thread is to leave the training function.
        """
        was_torn = self._torn
        self._updates += 1  # first: who sees a torn state must not take its update for a past one
        self._torn = True
        if self.is_shut:
            self._begin_again(was_torn)

    def _begin_again(self, was_torn: bool) -> None:
        with self._changed:
            self._updates -= 1
            self._torn = was_torn
            self._changed.notify_all()
            # the second optimizer of a step goes through, if that was not called complete
            while not self._ejecting and (
                self._barred or (self._is_closed() and (self._is_settled or not was_torn))
            ):
                self._changed.wait()
            if self._ejecting:
                raise EjectedError
            self._updates += 1
            self._torn = True

    def end_update(self) -> None:
        """After it."""
        self._updates -= 1
        if self.is_shut:
            self._tell()

    def commit(self, note: Callable[[], None]) -> None:
        """Make the step a commit; ``note`` writes it down while the listener does not look."""
        self._committing = True
        if self.is_shut:
            self._committing = False
            with self._changed:
                self._note(note)
                self._changed.notify_all()
            return
        try:
            self._note(note)
        finally:
            self._committing = False
            if self.is_shut:  # by now
                self._tell()  # type: ignore[unreachable]

    def _note(self, note: Callable[[], None]) -> None:
        note()
        self._torn = False
        self._updates = 0  # one that failed has told no end

    def pause(self) -> bool:
        """At a boundary: stay as long as the main thread is to be held.

        Returns:
            Whether it is to leave.

        Raises:
            EjectedError: it is to leave the training function, and to enter it again.
        """
        return self.is_shut and self._stay()

    def _stay(self) -> bool:
        while (arrived := self._wait()) is not None:
            arrived()  # without the lock: it may send, and the listener must not wait for that
        if self._ejecting:
            raise EjectedError
        return self._leaving

    def _wait(self) -> Callable[[], None] | None:
        """Until the main thread may go on; or it has come to where it is awaited: whom to tell."""
        with self._changed:
            while not (self._leaving or self._ejecting) and (
                self._holding or self._is_closed() or self._is_there()
            ):
                if self._arrived is not None and self._is_there():
                    arrived, self._arrived = self._arrived, None
                    return arrived
                self._held = True
                self._changed.notify_all()
                self._changed.wait()
            self._held = False
            return None

    def _is_closed(self) -> bool:
        return self._closed and self._step() >= self._closed_at

    def _is_there(self) -> bool:
        return self._stay_at is not None and self._step() >= self._stay_at

    def look(self) -> None:
        """While waiting for other ranks in another way than by a collective.

        Raises:
            EjectedError: the main thread is to leave the training function.
        """
        if self._ejecting:
            raise EjectedError

    def enter(self) -> None:
        """The main thread is back at its top, with no update under way, and nobody else's."""
        with self._changed:
            self._ejecting = self._raised = self._torn = False
            self._updates = 0
            self.is_shut = self._barred or self._leaving or self._closed or _IS_FREE_THREADED
            self._changed.notify_all()

    def note_raised(self) -> None:
        """The main thread came to its top with an exception: it goes nowhere any more."""
        with self._changed:
            self._raised = True
            self._changed.notify_all()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- the listener ---------------------------------------------------------------------------

    @property
    def is_torn(self) -> bool:
        """Whether an update began since the last commit."""
        return self._torn

    @property
    def is_held(self) -> bool:
        """Whether the main thread stands at a commit, or at its top with an exception."""
        return self._held or self._raised

    @property
    def is_asked(self) -> bool:
        """Whether the main thread is to stay at a commit, or to leave."""
        return self._stay_at is not None or self._leaving

    def hold(self) -> None:
        """Keep the main thread at its next commit; updates go on until then."""
        with self._changed:
            self._holding = self.is_shut = True

    def hold_next(self, is_over: Callable[[], bool]) -> int:
        """Keep the main thread at the end of the step it is in; which one that is.

        The flag is up before the step is looked at. So the main thread cannot pass by that step's
        end: either it sees the flag there, or its commit came before the look, and the step is a
        later one.

        Args:
            is_over: whether no step will follow; asked when the flag is up. The step is then the
                newest commit.
        """
        with self._changed:
            self.is_shut = True
            self._stay_at = step = self._step() + (not is_over())
            self._arrived = None
            self._changed.notify_all()
            return step

    def hold_at(self, step: int, arrived: Callable[[], None] | None = None) -> None:
        """Keep the main thread at this commit, and let it go on so far.

        Args:
            step: not one that the main thread is past.
            arrived: called once when the main thread comes to stay there, in it.
        """
        with self._changed:
            self.is_shut = True
            self._stay_at = step
            self._arrived = arrived
            self._changed.notify_all()

    def take_arrival(self) -> bool:
        """Whether nobody has told yet that the main thread arrived; from now on somebody has."""
        with self._changed:
            is_open, self._arrived = self._arrived is not None, None
            return is_open

    def leave(self) -> None:
        """Let the main thread out, with the order to leave: for good."""
        with self._changed:
            self.is_shut = self._leaving = True
            self._closed = self._holding = self._is_settled = False
            self._stay_at = self._arrived = None
            self._changed.notify_all()

    def eject(self) -> None:
        """Take the main thread out of the training function; from then on, let no update begin."""
        with self._changed:
            self.is_shut = self._ejecting = self._barred = True
            self._closed = self._holding = self._is_settled = False
            self._stay_at = self._arrived = None
            self._changed.notify_all()

    def bar(self) -> None:
        """Let no update begin before :meth:`open`; all else goes on."""
        with self._changed:
            self.is_shut = self._barred = True

    def open(self) -> None:
        """Let everything go on; an order to leave stands."""
        with self._changed:
            self._closed = self._holding = self._is_settled = self._barred = False
            self._stay_at = self._arrived = None
            self.is_shut = self._leaving or self._ejecting or _IS_FREE_THREADED
            self._changed.notify_all()

    def close(
        self,
        grace_s: float,
        is_complete: Callable[[], bool],
        is_touched: Callable[[], bool] = lambda: False,
        newest: int = 0,
    ) -> Stand:
        """Let no update begin; let one that is under way come to its commit, if it can.

        Args:
            grace_s: how long to wait for that.
            is_complete: whether all that a step usually changes has changed; asked when the main
                thread stands still after an update, in a collective that a dead rank never joins.
            is_touched: whether the script has changed state by itself since the commit.
            newest: the newest commit of any rank; who is one behind may come to it, see below.
        """
        began = time.monotonic()
        with self._changed:
            self._closed = self.is_shut = True
            self._arrived = None  # whoever waits for that is answered here
            self._closed_at = newest if self._step() + 1 == newest else 0
            self._catch_up(min(grace_s, CATCH_UP_S))
            self._closed_at = 0
            main, has_waited = _Main(), False
            while self._committing or self._torn or is_touched():
                is_still = main.still_s() > STILL_S or self._raised
                if is_still and not self._committing and self._updates == 0 and is_complete():
                    self._is_settled = True
                    return Stand.UPDATED
                # a main thread that saw the gate shut needs the lock to take its update back
                if self._raised or (time.monotonic() > began + grace_s and has_waited):
                    return Stand.TORN
                self._changed.wait(LOOK_S)
                has_waited = True
            return Stand.WHOLE

    def _catch_up(self, within_s: float) -> None:
        """Let the main thread come to the commit at which it is closed. The lock is held.

        A peer came to it, and so had all that it needs of the others: the same has been sent to
        this rank, or it raises, as the peer is gone. A step less is trained again.
        """
        main, deadline = _Main(), time.monotonic() + within_s
        while not (self._is_closed() or self._raised or self._held or self._barred):
            if main.still_s() > STILL_S or time.monotonic() > deadline:
                return
            self._changed.wait(LOOK_S)


class _Main:
    """The main thread, looked at now and then."""

    def __init__(self) -> None:
        self._place, self._since = _place(), time.monotonic()

    def still_s(self) -> float:
        """How long it has been at one instruction, as far as was seen."""
        if (place := _place()) != self._place:
            self._place, self._since = place, time.monotonic()
        return time.monotonic() - self._since


def _place() -> tuple[int, int]:
    """The instruction the main thread is at."""
    ident = threading.main_thread().ident
    frame: FrameType | None = None if ident is None else sys._current_frames().get(ident)  # noqa: SLF001
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)
