"""Whoever holds a step on its device finds the private state of a dead rank as of that step.

Ranks train with real pages and real writers of them; only their devices are doubles, which do their
work late. A rank is killed at any point, also in the middle of a copy to its page.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from support.copy_queue import DoubleQueue, WithoutBeginStamp
from support.device_double import Clock, Device
from torch import nn

from agent.hooks.status_pages import StatusPages
from worker_hooks.contract import status_page as pages
from worker_hooks.contract.status_page import CommitRecord, Page
from worker_hooks.device import devices, stamped_copies
from worker_hooks.device.timeline import DeviceTimeline, MarkKind
from worker_hooks.state.committed_state import CommittedState
from worker_hooks.state.private import Position, PrivateState
from worker_hooks.state.registry import pieces_of
from worker_hooks.storage import private_records
from worker_hooks.tensors.tensor_bytes import from_bytes

GRACE_S, STILL_S = 20.0, 0.2
HELD = (torch.device("cpu"),)
LARGE = 1500  # elements: more than is always copied


class NoLoader:
    entries = ()

    def fill(self, _address: int, _known: object = None) -> int:
        return 0


class Job:
    """What all ranks of one schedule share."""

    def __init__(self, seed: int, kind: type[DoubleQueue], mutant: str) -> None:
        self.rng, self.clock = random.Random(seed), Clock()
        rng = self.rng
        self.kind, self.mutant = kind, mutant
        self.count = rng.choice((2, 2, 3, 4))
        self.logs = rng.random() < 0.3  # an all-reduce of the loss behind the update
        self.has_late = rng.random() < 0.3  # a buffer changes behind the update
        self.reads_loss = rng.random() < 0.2
        self.micro = rng.choice((1, 1, 1, 2))
        self.is_counted = rng.random() < 0.6  # changes of the large buffer
        self.copy_s = rng.choice((0.0, 0.001, 0.02))
        self.step_s = rng.choice((0.001, 0.02, 0.05))
        self.delivers = rng.random() < 0.5  # what a dead rank's device had begun to send
        self.dead: int | None = None
        self.is_closed = False  # the gates
        self.come: dict[float, set[int]] = {}
        self.ranks = [Rank(self, rank) for rank in range(self.count)]

    def large(self, step: int) -> int:
        """The large buffer as of a step: it changes every third one, or in each."""
        return step // 3 if self.is_counted else step

    def kill(self, rank: int) -> None:
        self.dead = rank
        self.clock.devices.remove(self.ranks[rank].device)


class Rank:
    """A rank's main thread, which queues its work, and its device."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.committed = job, rank, 0
        self.device = Device(job.clock)
        self.net = nn.Module()
        self.net.register_buffer("count", torch.zeros(1))  # in host memory
        self.net.register_buffer("mean", torch.full((3,), float(self.value(0))))
        self.net.register_buffer("var", torch.full((3, 2), float(self.value(0))))
        self.net.register_buffer("large", torch.zeros(LARGE))
        self.timeline = DeviceTimeline(lambda: (self.device.mark(),))
        self.private = PrivateState(pieces_of({"model": self.net}))
        stamped_copies.StreamQueue = lambda _: job.kind(  # restored by the fixture
            self.device, lambda: job.rng.uniform(0, job.copy_s)
        )
        fd = self.private.open(rank, 0, NoLoader(), b"{}", HELD)
        self.reader = Page(fd)  # as the agent has it
        os.close(fd)
        self.write(0, is_commit=True)
        self.timeline.commit(0)
        if job.mutant != "first is not waited for":
            job.clock.advance(1)  # the first record of a page is waited for
        self.steps = self._steps()

    def value(self, step: int, micro: int | None = None, *, is_late: bool = False) -> int:
        micro = self.job.micro - 1 if micro is None else micro
        return 10000 * (self.rank + 1) + 10 * step + micro + 5 * is_late

    def write(self, step: int, *, is_commit: bool) -> None:
        self.net.count.fill_(step)
        meta = json.dumps({"step": step}).encode()
        self.private.write(step, Position(0, step, meta), is_commit=is_commit)

    def collective(self, number: float) -> None:
        job, come = self.job, self.job.come.setdefault(number, set())

        def all_are_there() -> bool:
            come.add(self.rank)
            return len(come) == job.count and (job.dead is None or job.delivers)

        self.device.collective(job.rng.uniform(0, job.step_s), all_are_there)
        # a dead rank's last bytes may be lost on their way, although it was done itself
        self.device.collective(0.0, lambda: job.dead is None or job.delivers)

    def forward(self, step: int, micro: int) -> None:
        net, job = self.net, self.job
        if job.is_counted and job.large(step) != job.large(step - 1):
            torch.autograd.graph.increment_version(net.large)

        def kernel() -> None:
            net.mean.data.fill_(self.value(step, micro))
            net.var.data.fill_(self.value(step, micro))
            net.large.data.fill_(job.large(step))

        self.device.run(job.rng.uniform(0, job.step_s), kernel)

    def change_late(self, step: int) -> None:
        late = self.value(step, is_late=True)

        def kernel() -> None:
            self.net.var.data.fill_(late)

        self.device.run(0.001, kernel)

    def _steps(self) -> Iterator[None]:
        job, rng = self.job, self.job.rng
        while True:
            step = self.committed + 1
            for micro in range(job.micro):
                self.forward(step, micro)
                yield
                if job.mutant != "behind backward":
                    self.write(step, is_commit=False)
                    yield
                self.device.kernel(rng.uniform(0, job.step_s))
                yield
            self.collective(step)
            yield
            if job.mutant == "behind backward":
                self.write(step, is_commit=False)
                yield
            while job.is_closed or not self.timeline.may_update():
                yield
            self.timeline.begin_update(step)
            self.device.kernel(rng.uniform(0, job.step_s), w=step)
            yield
            self.timeline.end_update(step)
            yield
            if job.logs:
                self.collective(step + 0.5)
                yield
            if job.has_late:
                self.change_late(step)
                yield
            while job.reads_loss and self.device.queue:
                yield
            self.write(step, is_commit=True)
            is_as_updated = not self.private.may_have_late_buffers() or job.mutant == "as updated"
            self.timeline.commit(step, is_as_updated=is_as_updated)
            self.committed = step
            yield


def content(page: Page, record: CommitRecord) -> dict[str, list[float]]:
    """The values of each buffer, each once."""
    found, at = {}, 0
    for entry in page.entries:
        if entry.name.startswith("model."):
            octets = record.payload[at : at + entry.nbytes]
            found[entry.name[6:]] = sorted(set(from_bytes(entry, octets).view(-1).tolist()))
        at += entry.nbytes
    return found


def check(rank: Rank, record: CommitRecord, *, is_needed: bool) -> None:
    """Its bytes are those of its step, whatever part of it the step is."""
    job, step = rank.job, record.step
    assert json.loads(record.meta) == {"step": step}
    is_whole = record.is_commit and not record.has_early_buffers
    found = content(rank.reader, record)
    micros = [job.micro - 1] if is_needed or is_whole or step == 0 else range(job.micro)
    means = [[float(rank.value(step, micro))] for micro in micros]
    assert found["count"] == [step]
    assert found["large"] == [job.large(step)]
    assert found["mean"] in means, (found, means)
    late = [float(rank.value(step, is_late=True))]
    if job.has_late and is_whole and step:
        assert found["var"] == late
    elif job.has_late and not record.is_commit:  # that of the commit, where it is there by then
        assert found["var"] in (*means, late)
    else:
        assert found["var"] in means


def schedule(seed: int, kind: type[DoubleQueue] = DoubleQueue, mutant: str = "") -> str:
    job = Job(seed, kind, mutant)
    try:
        victim = train(job)
        return judge(job, victim)
    finally:
        for rank in job.ranks:
            rank.reader.close()
            rank.private.page.close()


def train(job: Job) -> Rank:
    """Until a rank is killed, and the others have done what they can without it."""
    rng, clock = job.rng, job.clock
    speeds = [rng.choice((1, 1, 3)) for _ in job.ranks]
    for _ in range(rng.randrange(5, 60)):
        for rank, speed in zip(job.ranks, speeds, strict=True):
            for _ in range(rng.randrange(4) * speed):
                next(rank.steps)
        clock.advance(rng.choice((0.0, 0.001, 0.01, 0.05)))
    victim = rng.choice(job.ranks)
    job.kill(victim.rank)
    survivors = [rank for rank in job.ranks if rank is not victim]
    for _ in range(rng.randrange(20)):
        for rank in survivors:
            next(rank.steps)
        clock.advance(rng.choice((0.0, 0.001, 0.01)))
    job.is_closed = True
    for rank in survivors:
        for _ in range(rng.randrange(12)):
            next(rank.steps)
    clock.advance(GRACE_S)
    return victim


def judge(job: Job, victim: Rank) -> str:
    """Look at all pages, and at which kind of record the dead rank has of what the others hold."""
    clock = job.clock
    places = {
        rank.rank: rank.timeline.settle(GRACE_S, STILL_S, clock, lambda: clock.advance(1))
        for rank in job.ranks
        if rank is not victim
    }
    for rank in job.ranks:  # never wrong bytes, in whatever is read
        for record in rank.reader.records():
            check(rank, record, is_needed=False)
    assert job.has_late or not any(rank.private.late_buffers for rank in job.ranks)
    whole = {rank: place for rank, place in places.items() if place is not None and place.is_whole}
    kind = "torn"
    for place in whole.values():
        record = victim.reader.record(place.step)
        assert record is not None, f"nothing of step {place.step}"
        check(victim, record, is_needed=True)
        kind = "early" if record.has_early_buffers else "commit"
        kind = kind if record.is_commit else "under way"
    newest = max((place.step for place in whole.values()), default=0)
    for rank in places if whole else ():  # the newest step is repeated by all
        place = whole.get(rank)
        is_commit = place is not None and place == (newest, MarkKind.COMMIT, True)
        check_own(job.ranks[rank], newest, is_commit=is_commit)
    return kind


def check_own(rank: Rank, step: int, *, is_commit: bool) -> None:
    """A survivor's page, of the step that all repeat; whether it holds that as a commit."""
    record = rank.reader.record(step)
    assert record is not None
    check(rank, record, is_needed=True)
    if rank.job.has_late and is_commit and step:
        # its buffers are those that the dead rank is given
        assert record.is_commit
        assert not record.has_early_buffers
        assert rank.private.late_as_of(step) == {"model.var"}


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setattr(devices, "is_on_host", lambda tensor: tensor.numel() == 1)
    monkeypatch.setattr(stamped_copies.page_lock, "lock", lambda *_: True)
    monkeypatch.setattr(stamped_copies.page_lock, "unlock", lambda *_: None)
    monkeypatch.setattr(stamped_copies, "StreamQueue", None)


@pytest.mark.parametrize("part", range(25))
def test_a_dead_rank_has_what_the_living_hold_in_2500_schedules(part):
    outcomes = Counter(schedule(seed) for seed in range(100 * part, 100 * (part + 1)))
    assert min(outcomes[each] for each in ("commit", "early", "under way")) > 0, outcomes
    assert outcomes["torn"] < 40, outcomes


def fails(kind: type[DoubleQueue] = DoubleQueue, mutant: str = "") -> bool:
    for seed in range(2500):
        try:
            schedule(seed, kind, mutant)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("mutant", ["behind backward", "first is not waited for", "as updated"])
def test_each_rule_is_needed(mutant):
    assert fails(mutant=mutant)


def test_a_third_commit_is_needed_as_the_main_thread_is_one_step_further(monkeypatch):
    create = pages.create
    monkeypatch.setattr(
        pages, "create", lambda *args, **more: create(*args, **{**more, "runs_ahead": False})
    )
    assert fails()


def test_the_first_stamp_is_needed():
    assert fails(WithoutBeginStamp)


def test_two_backwards_of_a_step_need_stamps_of_their_own(monkeypatch):
    monkeypatch.setattr(stamped_copies, "stamp", lambda step, _: pages.stamp(step, 0))
    assert fails()


def test_bytes_are_found_by_their_stamp_not_by_their_place(monkeypatch):
    def whatever_is_there(self, step, *, is_commit, start=0, stop=None):
        area = step % 2 + 2 * (not is_commit)
        (begin,) = pages._STAMP.unpack_from(self._map, self._area_at(area))
        (end,) = pages._STAMP.unpack_from(self._map, self._end_at(area))
        at = self._area_at(area) + pages._STAMP_ROOM
        is_there = begin == end != 0
        return self._map[at + start : at + (stop or self.device_bytes)] if is_there else None

    monkeypatch.setattr(Page, "device_part", whatever_is_there)
    assert fails()


class Training:
    """One rank's committed state, as the main thread of a script drives it, and its device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.device = Device(self.clock)
        self.queue = DoubleQueue(self.device)
        monkeypatch.setattr(stamped_copies, "StreamQueue", lambda _: self.queue)
        monkeypatch.setattr(stamped_copies.time, "sleep", self.clock.advance)
        monkeypatch.setattr(devices, "_mark", lambda _: self.device.mark())
        self.net = nn.BatchNorm1d(3)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.state = CommittedState(
            pieces_of({"model": self.net, "optimizer": self.optimizer}), dict
        )
        self.open()
        self.state.begin_loop(0, 0)

    def close(self) -> None:
        self.state.page.close()

    def open(self) -> None:
        os.close(self.state.open(0, 0, NoLoader(), Position(0, self.state.step)))

    def forward(self) -> None:
        step = self.state.step + 1

        def kernel() -> None:
            self.net.running_mean.data.fill_(step)

        self.device.run(0.01, kernel)

    def step(self, late: float = 0.0) -> None:
        step = self.state.step + 1
        self.forward()
        self.state.under_way(Position(0, step))
        self.state.device.update_begins(self.state.step, str)
        self.state.updated(1)

        def kernel() -> None:
            self.net.running_mean.data.add_(late)

        if late:
            self.device.run(0.01, kernel)
        self.state.commit(Position(0, step))

    def buffers(self, step: int) -> list[float]:
        return next(
            from_bytes(entry, bytes(octets)).tolist()
            for entry, octets in self.state.replica(step).buffers
            if entry.name == "model.running_mean"
        )


@pytest.fixture
def training(monkeypatch) -> Iterator[Training]:
    found = Training(monkeypatch)
    yield found
    found.close()


def test_a_step_and_its_commit_wait_for_nothing(training):
    training.clock.advance(1)
    began_s = training.clock.now_s
    training.device.collective(0, lambda: False)  # a peer is dead
    training.step()
    assert training.clock.now_s == began_s
    assert training.state.step == 1
    assert training.state.position(1) == (1, 1)
    assert training.state.page.record(1) is None
    assert training.state.settle_devices(GRACE_S, is_updated=False).step == 0
    assert training.buffers(0) == [0, 0, 0]


def test_the_mark_of_a_commit_is_behind_its_copies(training):
    training.step()
    while not training.state.device.timeline.place().step:
        training.clock.advance(0.001)
    record = training.state.page.record(1)
    assert (record.is_commit, record.has_early_buffers) == (True, False)


def test_a_late_buffer_is_found_in_a_freeze(training):
    training.step(late=0.5)
    training.clock.advance(1)
    assert training.state.private.late_buffers == set()
    replica = training.state.replica(1)  # a freeze: the listener looks
    assert json.loads(replica.metadata["facts"])["late"] == ["model.running_mean"]
    assert training.buffers(1) == [1.5, 1.5, 1.5]


def test_a_late_buffer_is_found_a_step_later(training):
    training.step(late=0.5)
    training.clock.advance(1)
    assert training.state.private.may_have_late_buffers()
    training.step()
    assert training.state.private.late_buffers == {"model.running_mean"}
    assert training.state.private.may_have_late_buffers()


def test_what_is_known_not_to_be_late_may_wait_for_a_log(training):
    for _ in range(2):
        assert training.state.private.may_have_late_buffers()
        training.step()
        training.clock.advance(1)
    assert not training.state.private.may_have_late_buffers()


def test_a_step_whose_commit_alone_is_missing_queues_nothing(training):
    training.step()
    training.queue.copied.clear()
    assert training.state.private.settle(2, Position(0, 2))
    assert training.queue.copied == []


def test_a_new_page_has_what_the_device_wrote_to_the_one_before(training):
    for _ in range(3):
        training.step()
    training.forward()
    training.state.under_way(Position(0, 4))
    training.open()  # waits for the device
    page = training.state.page
    assert page.record(4).is_commit is False
    for step in (2, 3):
        assert page.record(step).is_commit
        assert not page.record(step).has_early_buffers
        assert training.buffers(step) == [step] * 3
    training.step()
    training.clock.advance(1)
    assert training.buffers(4) == [4, 4, 4]


def test_a_page_is_given_back_after_the_state_was_replaced(training, monkeypatch):
    unlocked: list[int] = []
    monkeypatch.setattr(stamped_copies.page_lock, "unlock", unlocked.append)
    training.step()
    old = training.state.page.memory[0]
    training.state.begin_again(0)
    assert unlocked == []  # its device may still write there
    training.open()
    assert unlocked == [old]


def test_the_agent_reads_what_the_rank_reads(training):
    training.step()
    training.clock.advance(1)
    fd = os.memfd_create("copy", os.MFD_ALLOW_SEALING)
    os.write(fd, training.state.page._map[:])
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    kept = StatusPages()
    kept.keep(0, 0, fd)
    assert private_records.completed(kept.all(), [0], 1) == {0: training.state.page.record(1)}
    assert kept.position([0], 1) == (1, 1)
    kept.clear()
