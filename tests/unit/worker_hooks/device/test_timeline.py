"""What a device holds is known from the marks that it has passed, never from what was queued."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.device_double import GARBAGE, Clock, Device

from worker_hooks.device.timeline import DeviceFailedError, DevicePlace, DeviceTimeline, MarkKind

STILL_S, GRACE_S = 0.2, 20.0
NEVER = 10**9


def settle(timeline: DeviceTimeline, clock: Clock, look_s: float = 0.01) -> DevicePlace | None:
    return timeline.settle(GRACE_S, STILL_S, clock, lambda: clock.advance(look_s))


def begun() -> tuple[Clock, Device, DeviceTimeline]:
    """One device, at its first commit."""
    clock = Clock()
    device = Device(clock, {"a": 0})
    timeline = DeviceTimeline(lambda: (device.mark(),))
    timeline.commit(0)
    return clock, device, timeline


class Training:
    """The main thread of a rank: queues steps, and does what a script may do."""

    def __init__(self, rng: random.Random, devices: int, dies_in: int) -> None:
        """``dies_in``: the step whose all-reduce a peer never joins."""
        self.rng, self.clock, self.dies_in = rng, Clock(), dies_in
        self.devices = [Device(self.clock, {"a": 0, "b": 0, "ema": 0}) for _ in range(devices)]
        self.timeline = DeviceTimeline(lambda: tuple(each.mark() for each in self.devices))
        self.timeline.commit(0)
        self.committed = 0  # by the main thread
        self.is_closed = False  # the gate
        self.has_ema = rng.random() < 0.3  # changed behind the update
        self.logs = rng.random() < 0.4  # an all-reduce of the loss behind the update
        self.reads_loss = rng.random() < 0.3  # .item() behind the update
        self.optimizers = rng.choice((1, 1, 2))

    def steps(self) -> Iterator[None]:
        """Each ``next`` is a moment at which the listener may run."""
        while True:
            yield from self.step(self.committed + 1)

    def step(self, step: int) -> Iterator[None]:
        self.kernels(2)
        yield
        self.collective(step)
        yield
        writes = {"a": step}, {"b": step}
        for optimizer in range(self.optimizers):
            while self.is_closed and optimizer == 0:  # the second one of a step may pass
                yield
            while not self.timeline.may_update():
                self.clock.advance(0.001)
                yield
            self.timeline.begin_update(step)
            yield
            for each in writes if self.optimizers == 1 else writes[optimizer : optimizer + 1]:
                for device in self.devices:
                    device.kernel(self.rng.uniform(0, 0.02), **each)
                yield
            self.timeline.end_update(step)
            yield
        if self.logs:
            self.collective(step + 0.5)
            yield
        if self.has_ema:
            for device in self.devices:
                device.kernel(0.01, ema=step)
            yield
        while self.reads_loss and any(device.queue for device in self.devices):
            self.clock.advance(0.002)
            yield
        self.timeline.commit(step, is_as_updated=not self.has_ema)
        self.committed = step
        yield

    def kernels(self, count: int) -> None:
        for device in self.devices:
            for _ in range(count):
                device.kernel(self.rng.uniform(0, 0.03))

    def collective(self, step: float) -> None:
        for device in self.devices:
            device.collective(self.rng.uniform(0, 0.05), lambda: step < self.dies_in)

    def read(self) -> list[dict[str, int]]:
        """Copy the memory of all devices, which get on with their work meanwhile."""
        found: list[dict[str, int]] = [{} for _ in self.devices]
        for name in "a", "b", "ema":
            for copy, device in zip(found, self.devices, strict=True):
                copy[name] = device.memory[name]
                self.clock.advance(self.rng.choice((0, 0.001, 0.02)))
        return found

    def state(self, step: int) -> dict[str, int]:
        return {"a": step, "b": step, "ema": step if self.has_ema else 0}


@pytest.mark.parametrize("part", range(10))
def test_what_is_read_is_one_step_in_ten_thousand_schedules(part):
    outcomes: dict[str, int] = {}
    for seed in range(1000 * part, 1000 * (part + 1)):
        outcome = schedule(seed)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes["whole"] > 500, outcomes
    assert outcomes.get("moved", 0) < 100, outcomes


def schedule(seed: int) -> str:
    rng = random.Random(seed)
    training = Training(rng, rng.choice((1, 1, 2)), rng.choice((NEVER, 1, 2, 3, 4, 5)))
    clock, timeline = training.clock, training.timeline
    steps = training.steps()
    for _ in range(rng.randrange(120)):
        next(steps)
        clock.advance(rng.choice((0, 0, 0.001, 0.01, 0.05)))
    training.is_closed = True
    behind = rng.randrange(20)

    def wait() -> None:
        nonlocal behind
        if behind:  # the main thread comes to the gate, or to where it waits for its device
            behind -= 1
            next(steps)
        clock.advance(0.01)

    began_s = clock()
    place = timeline.settle(GRACE_S, STILL_S, clock, wait)
    assert clock() - began_s <= GRACE_S + 0.1, seed
    assert place is not None, seed
    assert training.committed - 1 <= place.step <= training.committed + 1, seed
    if not place.is_whole:
        # an update ends unless something is missing in front of it, and then it has not begun
        assert training.optimizers > 1 or training.has_ema or place.kind is not MarkKind.COMMIT, (
            seed
        )
        return "torn"
    for _ in range(behind):
        next(steps)
    read = training.read()
    if timeline.place() != place:
        return "moved"  # what was read is thrown away
    is_commit = place.kind is MarkKind.COMMIT
    if is_commit:
        assert read == [training.state(place.step)] * len(read), seed
    for device in training.devices:
        device.abort()
    clock.advance(10)
    return "whole" if is_commit else "updated"


def test_the_main_thread_is_ahead_of_a_dead_all_reduce():
    """B1: the step that is saved is the one before it, although a later one is committed."""
    clock, device, timeline = begun()
    for step, is_joined in (1, True), (2, False):
        device.kernel(0.01)
        device.collective(0.01, lambda is_joined=is_joined: is_joined)
        while not timeline.may_update():
            clock.advance(0.001)
        timeline.begin_update(step)
        device.kernel(0.01, a=step)
        timeline.end_update(step)
        timeline.commit(step)
    device.kernel(0.01)  # forward of step 3
    clock.advance(0.001)
    assert not timeline.may_update()  # of step 3, which would make three commits of one device
    assert settle(timeline, clock) == DevicePlace(1, MarkKind.COMMIT, is_whole=True)
    assert device.memory["a"] == 1
    device.abort()
    clock.advance(1)
    assert device.memory["a"] == GARBAGE  # therefore the copy is made before


def test_an_update_that_is_under_way_is_waited_for():
    clock, device, timeline = begun()
    timeline.begin_update(1)
    device.kernel(3.0, a=1)
    timeline.end_update(1)
    timeline.commit(1)
    clock.advance(0.001)
    assert timeline.place() == DevicePlace(1, MarkKind.BEGIN, is_whole=False)
    assert settle(timeline, clock) == DevicePlace(1, MarkKind.COMMIT, is_whole=True)
    assert 3.0 < clock() < 3.1


def test_an_update_that_waits_for_a_peer_is_given_up_by_its_deadline():
    clock, device, timeline = begun()
    timeline.begin_update(1)
    device.collective(0.0, lambda: False)  # a sharded optimizer gathers inside its step
    timeline.end_update(1)
    clock.advance(0.001)
    assert settle(timeline, clock) == DevicePlace(1, MarkKind.BEGIN, is_whole=False)
    assert GRACE_S <= clock() < GRACE_S + 0.1


def test_a_log_behind_the_update_does_not_hide_the_commit():
    clock, device, timeline = begun()
    timeline.begin_update(1)
    device.kernel(0.1, a=1)
    timeline.end_update(1)
    device.collective(0.0, lambda: False)
    timeline.commit(1, is_as_updated=True)
    assert settle(timeline, clock) == DevicePlace(1, MarkKind.COMMIT, is_whole=True)


def test_of_two_devices_the_slower_one_counts():
    clock = Clock()
    devices = [Device(clock, {"a": 0}) for _ in range(2)]
    timeline = DeviceTimeline(lambda: tuple(each.mark() for each in devices))
    timeline.commit(0)
    timeline.begin_update(1)
    for device, takes_s in zip(devices, (0.1, 1.0), strict=True):
        device.kernel(takes_s, a=1)
    timeline.end_update(1)
    timeline.commit(1)
    clock.advance(0.2)
    assert timeline.place() == DevicePlace(1, MarkKind.COMMIT, is_whole=False)
    assert settle(timeline, clock) == DevicePlace(1, MarkKind.COMMIT, is_whole=True)
    assert clock() > 1.0


def test_a_device_that_has_failed_is_said_and_never_read():
    clock, device, timeline = begun()
    device.error = "CUDA error: an illegal memory access was encountered"
    for asked in timeline.place, timeline.may_update, lambda: settle(timeline, clock):
        with pytest.raises(DeviceFailedError, match="illegal memory access"):
            asked()


def test_nothing_was_queued():
    clock = Clock()
    timeline = DeviceTimeline(lambda: ())
    assert timeline.may_update()
    assert settle(timeline, clock) is None
    assert clock() == 0


def test_marks_of_old_steps_are_let_go():
    clock, _, timeline = begun()
    for step in range(1, 100):
        clock.advance(1)
        timeline.begin_update(step)
        timeline.end_update(step)
        timeline.commit(step)
    assert len(timeline._entries) <= 6
    timeline.forget()
    assert timeline.place() is None


@pytest.mark.parametrize("waits_for_peer", [True, False])
def test_a_device_that_waits_is_busy_whatever_the_main_thread_does(waits_for_peer):
    """B3: the main thread may be in ``print(loss)``, which no list of names would find."""
    clock, device, timeline = begun()
    device.kernel(0.1)
    device.collective(0.0, lambda: not waits_for_peer)
    assert timeline.is_busy(lambda: clock.advance(0.2)) == waits_for_peer
