"""How far a rank's devices have come: which commit they hold, or that an update is under way there.

The main thread only queues work: it commits step n + 1 while a device may still wait in the
all-reduce of step n + 1, for ever if a peer has died. What device memory holds is decided by what
the device has passed. So the main thread leaves a mark in the queue of each device at each commit,
and in front of and behind each update. A mark is *passed* once the device has done all that was
queued before it::

    queue    | commit n |  forward, backward, all-reduce  | begin n+1 | update | end | commit n+1 |
    holds    |<------------------- n ---------------------------->|    torn    |<------ n + 1 ---

An update is not queued before the devices have passed the commit in front of it. So a device is
never more than one update behind, and the two newest commits are all that it can hold. It costs
nothing: all of the step's forward and backward is queued by then.

A passed mark stays passed, and the marks of one device are passed in their order. Therefore the
marks are asked newest first: what is passed after the question makes the answer older, not wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

_KEPT = 6  # marks: of two commits, and of two updates with their ends


class Mark(Protocol):
    """A place in the queue of a device; ``torch.Event`` is one."""

    def query(self) -> bool:
        """Whether the device has passed it; never waits.

        Raises:
            RuntimeError: the device has failed, and does nothing more.
        """


class MarkKind(Enum):
    """What the main thread did as it left a mark."""

    COMMIT = "commit"
    BEGIN = "begin"  # of an update
    END = "end"  # of the last update so far


class Queued(NamedTuple):
    """The marks that were left at one moment, one on each device."""

    kind: MarkKind
    step: int  # of a commit: its own; else that of the step under way
    marks: tuple[Mark, ...]


class DevicePlace(NamedTuple):
    """How far devices have come."""

    step: int  # the newest commit, or update, that at least one device has begun to pass
    kind: MarkKind
    is_whole: bool  # all devices hold one state: after this commit or update, before the next one


class DeviceFailedError(RuntimeError):
    """A device reports an error: what it holds cannot be read, and its process cannot use it."""


class DeviceTimeline:
    """The main thread leaves marks; the listener asks. Neither waits here, and nobody locks."""

    def __init__(self, leave: Callable[[], tuple[Mark, ...]]) -> None:
        """Nothing is queued.

        ``leave``: puts a mark at the end of each device's queue; does not wait.
        """
        self._leave = leave
        # replaced as a whole, so that the listener reads one that is consistent
        self._entries: tuple[Queued, ...] = ()

    # --- the main thread --------------------------------------------------------------------------

    def may_update(self) -> bool:
        """Whether an update may be queued: the devices have passed the commit in front of it.

        Raises:
            DeviceFailedError: a device does nothing more.
        """
        entries = self._entries
        if (
            not entries or entries[-1].kind is not MarkKind.COMMIT
        ):  # a further update of the same step
            return True
        return _are_passed(entries[-1].marks)

    def begin_update(self, step: int) -> None:
        """An update of the step under way is about to be queued.

        ``step``: the number that it will be committed under.
        """
        entries = self._entries
        if entries and entries[-1].kind is MarkKind.END:  # the step's next optimizer: torn again
            entries = entries[:-1]
        if not entries or entries[-1].kind is MarkKind.COMMIT:
            self._entries = (*entries, Queued(MarkKind.BEGIN, step, self._leave()))[-_KEPT:]
        else:
            self._entries = entries

    def end_update(self, step: int) -> None:
        """The update was queued, under the number that it will be committed under."""
        entries = self._entries
        if entries and entries[-1].kind is MarkKind.END:
            entries = entries[:-1]
        self._entries = (*entries, Queued(MarkKind.END, step, self._leave()))[-_KEPT:]

    def commit(self, step: int, *, is_as_updated: bool = False) -> None:
        """A step was committed; or, if nothing is queued yet, training begins at this one.

        Args:
            is_as_updated: nothing of the state was changed behind the update. What was queued there
                may wait for a dead peer, such as an all-reduce of the loss for the log.
        """
        entries = self._entries
        if is_as_updated and entries and entries[-1].kind is MarkKind.END:
            marks = entries[-1].marks
        else:
            marks = self._leave()
        self._entries = (*entries, Queued(MarkKind.COMMIT, step, marks))[-_KEPT:]

    def marks(self, step: int, kind: MarkKind) -> tuple[Mark, ...]:
        """What was left at a commit or behind an update; empty: it is not among the last ones."""
        found = (one.marks for one in self._entries if one.step == step and one.kind is kind)
        return next(found, ())

    def forget(self) -> None:
        """What was queued is of no interest any more: the state was replaced."""
        self._entries = ()

    # --- the listener -----------------------------------------------------------------------------

    def place(self) -> DevicePlace | None:
        """How far the devices have come at this moment; ``None``: no mark was passed yet.

        Raises:
            DeviceFailedError: a device does nothing more.
        """
        newest: DevicePlace | None = None
        for entry in reversed(self._entries):
            passed = [_is_passed(mark) for mark in entry.marks]
            if all(passed):
                is_whole = newest is None and entry.kind is not MarkKind.BEGIN
                return newest or DevicePlace(entry.step, entry.kind, is_whole)
            if newest is None and any(passed):
                newest = DevicePlace(entry.step, entry.kind, is_whole=False)
        return newest

    def is_busy(self, wait: Callable[[], None]) -> bool:
        """Whether devices have yet to do what was queued before this call.

        ``wait``: waits for what is queued on a device that waits for nobody.

        Raises:
            DeviceFailedError: a device does nothing more.
        """
        queued = self._entries[-1].marks if self._entries else ()
        marks = (*queued, *self._leave())
        wait()
        return not _are_passed(marks)

    def settle(
        self, grace_s: float, still_s: float, clock: Callable[[], float], wait: Callable[[], None]
    ) -> DevicePlace | None:
        """Wait until the devices stand still in one state, or can be seen not to.

        A device that waits for a dead peer stands still; one whose peers are alive passes its
        marks soon. Nobody can tell them apart but by looking for a while.

        Args:
            grace_s: how long an update may take.
            still_s: how long a device that holds a commit must not have passed a mark.
            clock: monotonic seconds.
            wait: waits until the next look.

        Returns:
            The last place that was seen; it is not whole if an update did not come to its end.

        Raises:
            DeviceFailedError: a device does nothing more.
        """
        began_s = moved_s = clock()
        place = self.place()
        while True:
            now_s = clock()
            if self._has_passed_all():
                return self.place()
            is_standing = place is not None and place.is_whole and now_s - moved_s >= still_s
            if is_standing or now_s - began_s >= grace_s:
                return place
            wait()
            if (now := self.place()) != place:
                place, moved_s = now, clock()

    def _has_passed_all(self) -> bool:
        entries = self._entries
        return not entries or _are_passed(entries[-1].marks)


def _are_passed(marks: Sequence[Mark]) -> bool:
    return all(map(_is_passed, marks))


def _is_passed(mark: Mark) -> bool:
    try:
        return mark.query()
    except RuntimeError as error:
        raise DeviceFailedError(str(error)) from error
