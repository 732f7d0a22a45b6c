"""A rank whose weights are on a device: what is saved is what the device holds, all of one step."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from support.device_double import GARBAGE, Clock, Device
from torch import nn

from worker_hooks.changes import observer
from worker_hooks.data.feed import Feed
from worker_hooks.device import devices
from worker_hooks.device.side_stream import DeviceAccess
from worker_hooks.device.timeline import DeviceFailedError, DevicePlace, DeviceTimeline, MarkKind
from worker_hooks.guard.gate import EjectedError, Gate
from worker_hooks.state import device_state
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.state.device_state import DeviceState, HeldStep, held_step
from worker_hooks.state.registry import pieces_of
from worker_hooks.tensors.shard import digest

GRACE_S = 5.0
NEVER = 10**9


class LateOptimizer(torch.optim.Optimizer):
    """Its weights and momenta change as the device comes to it, its step counters at once."""

    def __init__(self, parameters, device: Device, takes_s: float = 0.01) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.device, self.takes_s = device, takes_s

    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["momentum"] = torch.zeros_like(parameter)
                state["step"] += 1
                for tensor, factor in (parameter, 1), (state["momentum"], 10):
                    torch.autograd.graph.increment_version(tensor)
                    self._queue(tensor, int(state["step"]) * factor)

    def _queue(self, tensor: torch.Tensor, value: int) -> None:
        def write() -> None:
            tensor.data.fill_(GARBAGE if self.device.is_aborted else value)

        self.device.run(self.takes_s, write)


class Rank:
    """A training whose all-reduce of one step a peer never joins."""

    def __init__(self, monkeypatch, dies_in: int = NEVER) -> None:
        monkeypatch.setattr(devices, "is_on_host", lambda tensor: tensor.ndim == 0)
        self.clock = Clock()
        self.device = Device(self.clock)
        monkeypatch.setattr(device_state.time, "monotonic", self.clock)
        monkeypatch.setattr(device_state.time, "sleep", self.clock.advance)
        self.net = nn.Linear(3, 2)
        for each in self.net.parameters():
            each.data.zero_()
        self.optimizer = LateOptimizer(self.net.parameters(), self.device)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        things = {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.state = CommittedState(pieces_of(things), dict)
        self.state.device = DeviceState(DeviceTimeline(lambda: (self.device.mark(),)))
        self.state.changes.keeps_host = True
        self.state.begin_loop(0, 0)
        self.state._note(Position(0, 0))
        self.dies_in = dies_in
        self.is_closed = False

    def steps(self, count: int = NEVER) -> Iterator[None]:
        for _ in range(count):
            yield from self.step()

    def step(self) -> Iterator[None]:
        step = self.state.step + 1
        self.device.kernel(0.02)
        yield
        self.device.collective(0.01, lambda: step < self.dies_in)
        yield
        while self.is_closed or not self.state.device.timeline.may_update():
            self.clock.advance(0.001)
            yield
        self.state.update_begins()
        yield
        if self.is_closed:
            return  # at the gate, for ever
        self.state.device.update_begins(self.state.step, self.state.why_changed)
        yield
        self.optimizer.step()
        self.state.updated(1)
        yield
        self.scheduler.step()
        self.state.commit(Position(0, step))
        yield

    def queue_an_update_after(self, step: int) -> None:
        """Train until the update behind this commit is queued, and stop in front of its own."""
        steps = self.steps()
        while self.state.updates[1] == 0 or self.state.step < step:
            next(steps)
            self.clock.advance(0.0005)

    def saved(self, step: int) -> str:
        return digest(self.state.replica(step), lambda _: None)


@pytest.fixture
def undisturbed(monkeypatch) -> list[str]:
    """The digests of the first steps, each looked at when the device has done all of it."""
    rank, found = Rank(monkeypatch), []
    for step in range(8):
        rank.clock.advance(10)
        assert rank.state.settle_devices(GRACE_S, is_updated=False) == HeldStep(step)
        found.append(rank.saved(step))
        for _ in rank.steps(1):
            pass
    assert len(set(found)) == len(found)
    return found


def test_the_step_before_the_dead_all_reduce_is_saved(monkeypatch, undisturbed):
    rank = Rank(monkeypatch, dies_in=3)
    for _ in rank.steps(3):
        rank.clock.advance(0.0005)
    assert rank.state.step == 3  # as far as the main thread knows
    assert rank.state.settle_devices(GRACE_S, is_updated=False) == HeldStep(2)
    assert rank.saved(2) == undisturbed[2]
    assert rank.state.why_moved() == ""
    assert not rank.state.is_as_committed()
    rank.device.abort()
    rank.clock.advance(10)
    assert rank.state.why_moved() == "its device went on while the state was read"


def test_an_update_that_was_queued_in_front_of_item_is_not_there_yet(monkeypatch, undisturbed):
    rank = Rank(monkeypatch, dies_in=3)
    rank.queue_an_update_after(2)
    # the main thread waits for its loss behind the update: only the commit is missing
    assert rank.state.settle_devices(GRACE_S, is_updated=True) == HeldStep(2)
    assert rank.saved(2) == undisturbed[2]


def test_an_update_that_the_device_has_done_counts_although_its_commit_is_missing(
    monkeypatch, undisturbed
):
    rank = Rank(monkeypatch)
    rank.queue_an_update_after(2)
    rank.scheduler.step()
    rank.clock.advance(10)
    assert rank.state.settle_devices(GRACE_S, is_updated=True) == HeldStep(3)
    assert rank.saved(3) == undisturbed[3]


def test_a_rank_that_is_torn_on_the_host_may_be_whole_on_its_device(monkeypatch, undisturbed):
    rank = Rank(monkeypatch, dies_in=3)
    rank.queue_an_update_after(2)
    assert rank.state.settle_devices(GRACE_S, is_updated=False) == HeldStep(2)
    assert rank.saved(2) == undisturbed[2]


def test_what_the_script_changes_behind_a_commit_is_not_saved(monkeypatch):
    rank = Rank(monkeypatch)
    for _ in rank.steps(2):
        rank.clock.advance(1)
    with torch.no_grad():
        rank.net.weight.mul_(2)
    assert (
        "model.weight changed after step 2"
        in rank.state.settle_devices(GRACE_S, is_updated=False).why_not
    )
    rank.dies_in = 3
    for _ in rank.steps(1):
        rank.clock.advance(0.0005)
    # the device still holds step 2, and not as it was committed
    held = rank.state.settle_devices(GRACE_S, is_updated=False)
    assert held.step == 2
    assert "model.weight changed after step 2" in held.why_not


def test_a_large_state_on_a_device_that_has_nothing_to_do_is_known_in_its_first_steps(monkeypatch):
    monkeypatch.setattr(observer, "COPIED_AT_FIRST", 0)
    rank, is_idle = Rank(monkeypatch), []
    monkeypatch.setattr(devices, "are_idle", lambda _: bool(is_idle))
    rank.state.changes.begin(0.5)
    for _ in rank.steps(2):
        rank.clock.advance(1)
    rank.state.audit()
    for is_held in (False, True):
        held = rank.state.settle_devices(GRACE_S, is_updated=False, is_held=is_held)
        assert held == HeldStep(2, observer.UNSEEN)
    is_idle.append(1)
    assert rank.state.settle_devices(GRACE_S, is_updated=False).why_not == observer.UNSEEN
    assert rank.state.settle_devices(GRACE_S, is_updated=False, is_held=True) == HeldStep(2)
    rank.net.weight.data.mul_(2)  # torch does not count it
    held = rank.state.settle_devices(GRACE_S, is_updated=False, is_held=True)
    assert held.why_not == "model.weight changed after step 2"


@pytest.mark.parametrize("limit", [0, observer.COPIED_AT_FIRST])
def test_until_when_a_large_state_on_a_device_is_not_known_is_told(monkeypatch, limit):
    monkeypatch.setattr(observer, "COPIED_AT_FIRST", limit)
    monkeypatch.setattr(devices, "are_idle", lambda _: False)
    rank, told = Rank(monkeypatch), []
    rank.state.changes.begin(0.5)
    for step in range(1, 7):
        for _ in rank.steps(1):
            rank.clock.advance(1)
        rank.state.audit()
        why = rank.state.settle_devices(GRACE_S, is_updated=False).why_not
        left = rank.state.changes.unseen_steps()
        assert bool(left) == (why == observer.UNSEEN)
        told.append(left and step + left)
    assert told == ([0] * 6 if limit else [4, 4, 4, 0, 0, 0])


def test_an_optimizer_with_more_than_tensors_cannot_be_behind(monkeypatch):
    rank = Rank(monkeypatch, dies_in=2)
    for _ in rank.steps(1):
        rank.clock.advance(1)
    rank.optimizer.state[rank.net.weight]["count"] = 1
    for _ in rank.steps(1):
        rank.clock.advance(0.0005)
    held = rank.state.settle_devices(GRACE_S, is_updated=False)
    assert held == HeldStep(1, "an optimizer's state holds more than tensors, which has gone on")


def test_a_device_that_fails_is_said(monkeypatch):
    rank = Rank(monkeypatch)
    rank.device.error = "CUDA error: uncorrectable ECC error encountered"
    held = rank.state.settle_devices(GRACE_S, is_updated=False)
    assert held.is_failed
    assert "ECC error" in held.why_not
    assert "ECC error" in rank.state.why_moved()
    with pytest.raises(DeviceFailedError):
        rank.state.device.timeline.may_update()


def test_whatever_moment_it_is_a_step_is_saved_as_it_was(monkeypatch, undisturbed):
    outcomes: Counter[str] = Counter()
    for seed in range(300):
        rng = random.Random(seed)
        with monkeypatch.context() as patched:
            rank = Rank(patched, dies_in=rng.choice((1, 2, 3, 4, 5, NEVER)))
            steps = rank.steps()
            for _ in range(rng.randrange(35)):
                next(steps)
                rank.clock.advance(rng.choice((0, 0.001, 0.01)))
                if rank.state.step >= len(undisturbed) - 2:
                    break
            rank.is_closed = True
            held = rank.state.settle_devices(GRACE_S, is_updated=False)
            if held.why_not:
                outcomes[held.why_not] += 1
                continue
            assert rank.state.step - 1 <= held.step <= rank.state.step
            found = rank.saved(held.step)
            if rank.state.why_moved():
                outcomes["moved"] += 1
                continue
            assert found == undisturbed[held.step], seed
            outcomes["saved"] += 1
    # else the first step's update was queued, or one was under way as the main thread was stopped
    assert outcomes["saved"] > 200, outcomes
    assert outcomes["moved"] == 0


@pytest.mark.parametrize(
    ("place", "is_updated", "held"),
    [
        (DevicePlace(7, MarkKind.COMMIT, is_whole=True), False, HeldStep(7)),
        (DevicePlace(6, MarkKind.COMMIT, is_whole=True), True, HeldStep(6)),
        (DevicePlace(8, MarkKind.END, is_whole=True), True, HeldStep(8)),
        (DevicePlace(8, MarkKind.END, is_whole=True), False, HeldStep(7, "its device did not come to the end of step 8")),
        (DevicePlace(7, MarkKind.END, is_whole=True), False, HeldStep(7, "its device did not come to the end of step 7")),
        (DevicePlace(8, MarkKind.BEGIN, is_whole=False), True, HeldStep(7, "its device did not come to the end of step 8")),
        (DevicePlace(7, MarkKind.COMMIT, is_whole=False), False, HeldStep(7, "its device did not come to the end of step 7")),
        (None, False, HeldStep(7, "its device has not come to its first commit")),
    ],
)  # fmt: skip
def test_which_step_a_place_is(place, is_updated, held):
    assert held_step(place, 7, is_updated=is_updated) == held


def test_a_main_thread_that_waits_for_its_device_can_be_taken_out():
    gate, found = Gate(), []

    def waits() -> None:
        try:
            gate.wait_until(lambda: False)
        except EjectedError:
            found.append(True)

    main = threading.Thread(target=waits)
    main.start()
    gate.eject()
    main.join(30)
    assert found == [True]
    gate.wait_until(lambda: True)


def test_what_devices_are_read_with_is_made_once_as_training_begins(monkeypatch):
    clock, made = Clock(), []
    device = Device(clock)
    monkeypatch.setattr(devices, "is_on_host", lambda tensor: tensor.ndim == 0)
    monkeypatch.setattr(devices, "_mark", lambda _: device.mark())

    def side_streams(tensors):
        made.append([tuple(each.shape) for each in tensors])
        return {torch.device("cpu"): "a side stream"}

    monkeypatch.setattr(device_state, "side_streams", side_streams)
    state = CommittedState(pieces_of({"w": torch.ones(3, 2), "s": torch.ones(())}), dict)
    sides = state.present().access.sides  # a new rank compares before it trains
    assert sides == {torch.device("cpu"): "a side stream"}
    for _ in range(2):
        os.close(state.open(0, 0, Feed(()), Position(0, 0)))
    assert state.present().access == DeviceAccess((), sides)
    (mark,) = state.device.ready(0, MarkKind.COMMIT)
    assert state.replica(0).access == DeviceAccess((mark,), sides)
    assert made == [[(3, 2), ()]]
    state.forget()
