"""The state of a rank whose tensors are on accelerators: which commit these hold.

The main thread's newest commit is what it has queued. The devices hold that one or the one before,
and in live memory each is found only while its devices hold it. What is in host memory has gone on
with the main thread, so it is copied at each commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import torch

from worker_hooks.device.side_stream import DeviceAccess, SideStream
from worker_hooks.device.timeline import DeviceFailedError, DevicePlace, DeviceTimeline, MarkKind
from worker_hooks.tensors.device_digest import side_streams

STILL_S = 0.2  # an all-reduce among living ranks ends sooner, or what was read is thrown away
_LOOK_S = 0.005


class HeldStep(NamedTuple):
    """What the devices hold."""

    step: int
    why_not: str = ""  # why it is no step that can be saved; empty: it is one
    is_failed: bool = False  # a device does nothing more: this process cannot use it again


class DeviceReading:
    """What a rank reads its accelerators with. Made by the main thread, and used by any."""

    def __init__(self) -> None:
        self._sides: dict[torch.device, SideStream] = {}

    def prepare(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make it, unless it is there: before training waits for anybody on these devices."""
        self._sides = self._sides or side_streams(tensors)

    def queued(self) -> DeviceAccess:
        """For what the main thread itself has queued by now."""
        return DeviceAccess((), self._sides)

    def passed(self, device: DeviceState | None, step: int, kind: MarkKind) -> DeviceAccess:
        """For what devices hold that have passed a commit, or its update."""
        return DeviceAccess(() if device is None else device.ready(step, kind), self._sides)


class DeviceState:
    """The main thread tells it what is queued; the listener asks, with the gate closed."""

    def __init__(self, timeline: DeviceTimeline) -> None:
        self.timeline = timeline
        # by commit, once an update has begun behind it: what had changed in between, as text
        self._changed: dict[int, str] = {}
        self._place: DevicePlace | None = None  # where the devices were found to stand, in a freeze

    # --- the main thread --------------------------------------------------------------------------

    def update_begins(self, step: int, why_changed: Callable[[], str]) -> None:
        """An update is about to be queued.

        ``why_changed``: what is not as of this commit any more, as text.
        """
        self._place = None
        if step not in self._changed:
            self._changed = {
                number: why for number, why in self._changed.items() if number == step - 1
            }
            self._changed[step] = why_changed()
        self.timeline.begin_update(step + 1)

    def committed(self, step: int, *, is_as_updated: bool) -> None:
        """See :meth:`DeviceTimeline.commit`."""
        self.timeline.commit(step, is_as_updated=is_as_updated)

    def forget(self) -> None:
        """The state was replaced."""
        self._changed, self._place = {}, None
        self.timeline.forget()

    # --- the listener -----------------------------------------------------------------------------

    def settle(self, grace_s: float, newest: int, *, is_updated: bool) -> HeldStep:
        """Wait until the devices stand still, and find out which step they hold.

        Args:
            grace_s: how long an update may take, in seconds.
            newest: the main thread's newest commit.
            is_updated: the update behind it is complete as far as the main thread is concerned, and
                only its commit is missing.
        """
        try:
            place = self.timeline.settle(
                grace_s, STILL_S, time.monotonic, lambda: time.sleep(_LOOK_S)
            )
        except DeviceFailedError as error:
            return HeldStep(newest, f"its device reports an error: {error}", is_failed=True)
        self._place = place
        held = held_step(place, newest, is_updated=is_updated)
        why = "" if held.why_not else self._changed.get(held.step, "")
        return held._replace(why_not=why) if why else held

    def is_busy(self) -> bool:
        """Whether a device waits, as a rule for a peer; one that has failed waits for nobody."""
        try:
            return self.timeline.is_busy(lambda: time.sleep(STILL_S))
        except DeviceFailedError:
            return False

    @property
    def is_settled(self) -> bool:
        """Whether it is known where the devices stand: nothing was queued since."""
        return self._place is not None

    def is_behind(self, step: int) -> bool:
        """Whether an update was queued behind this commit, so that the host has gone on."""
        return step in self._changed

    def holds(self, step: int) -> bool:
        """Whether the devices held this commit when they were looked at last, and no update of it
        was queued.
        """
        place = self._place
        return place is not None and place.step == step and not self.is_behind(step)

    def ready(self, step: int, kind: MarkKind) -> tuple[torch.Event, ...]:
        """What the devices pass before their memory is that of a commit, or of its update."""
        return cast("tuple[torch.Event, ...]", self.timeline.marks(step, kind))

    def why_moved(self) -> str:
        """Why what was read since :meth:`settle` may be of two steps; empty: it is of one."""
        try:
            is_there = self.timeline.place() == self._place
        except DeviceFailedError as error:
            return f"its device reports an error: {error}"
        return "" if is_there else "its device went on while the state was read"


def held_step(place: DevicePlace | None, newest: int, *, is_updated: bool) -> HeldStep:
    """Which step devices hold that stand at this place. Pure; for the rest see `settle`."""
    if place is None:
        return HeldStep(newest, "its device has not come to its first commit")
    is_end = place.kind is MarkKind.END and is_updated and place.step == newest + 1
    if place.is_whole and (place.kind is MarkKind.COMMIT or is_end):
        return HeldStep(place.step)
    return HeldStep(
        min(place.step, newest), f"its device did not come to the end of step {place.step}"
    )
