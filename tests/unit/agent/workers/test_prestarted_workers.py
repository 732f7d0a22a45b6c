"""Newcomers that come to life before anybody decided to replace ranks."""

import pytest

from agent.controller import actions as do
from agent.workers.replacements import Replacements
from agent.workers.worker import Worker
from worker_hooks.contract import protocol

PREPARE = do.PrepareRanks(1, (1, 2), "they are dead")
REPLACE = do.ReplaceRanks(1, (0,), (1, 2), "/proc/1/fd/5", 5, "they are dead")


class Stage:
    """A starter and an output that note what they are told; ranks 0 to 2, of attempt 0."""

    port = 1000

    def __init__(self):
        self.told, self.discarded = [], []
        self.reserved = 2000
        self.workers = {rank: Worker(rank, rank, 0) for rank in range(3)}
        self.newcomers = Replacements(self.plan, self, self)

    def plan(self, _attempt, _resumes, _devices):
        return tuple(
            protocol.WorkerOrder(rank, (), {"RANK": str(rank)}, f"{rank}.log", f"{rank}.log")
            for rank in range(3)
        )

    def reserve(self, attempt):
        self.told.append(("reserve", attempt))
        return self.reserved

    def make_next(self, orders):
        return tuple(order._replace(stdout="ahead") for order in orders)

    def prestart(self, orders):
        self.note("ahead", orders)

    def make(self, _attempt, orders):
        self.note("make", orders)

    def add(self, *told):
        if len(told) == 1:
            self.note("add", told[0])

    def close_next(self):
        self.told.append("forget")

    def discard(self, orders):
        self.discarded += [order.rank for order in orders]

    def note(self, what, orders):
        self.told.append((what, [(order.rank, order.stdout) for order in orders]))
        self.ports = {order.environ["MASTER_PORT"] for order in orders}

    def forked(self, rank, pid, attempt=1, exit_code=None):
        return self.newcomers.forked(protocol.Forked(rank, attempt, pid), exit_code)

    def failed(self, rank, attempt=1):
        return self.newcomers.failed(protocol.ForkFailed(rank, attempt, "no memory"))

    def begin(self, action=REPLACE):
        found = self.newcomers.begin(action, self.workers)
        (added,) = (ranks for what, ranks in self.told[-1:] if what == "add")
        return found, [rank for rank, _ in added]


@pytest.fixture
def stage():
    return Stage()


def prepared():
    stage = Stage()
    assert stage.newcomers.prepare(PREPARE, stage.workers)
    return stage


def test_they_are_ordered_with_the_port_that_is_reserved(stage):
    assert stage.newcomers.prepare(PREPARE, stage.workers)
    assert stage.told == [("reserve", 1), ("ahead", [(1, "ahead"), (2, "ahead")])]
    assert stage.ports == {"2000"}
    assert stage.newcomers.is_awaited
    assert [worker.attempt for worker in stage.workers.values()] == [0, 0, 0]


def test_where_nobody_can_be_started_they_are_ordered_later(stage):
    stage.reserved = 0
    assert not stage.newcomers.prepare(PREPARE, stage.workers)
    assert not stage.newcomers.is_awaited
    assert stage.begin() == ([], [1, 2])
    assert stage.ports == {"1000"}


def test_who_exists_already_is_told_and_who_is_on_the_way_is_not_ordered_again():
    stage = prepared()
    assert stage.forked(1, 101)
    assert stage.newcomers.is_awaited
    found, added = stage.begin()
    assert [(worker.rank, worker.pid, worker.attempt) for worker in found] == [(1, 101, 1)]
    assert added == []
    assert stage.discarded == []
    assert (stage.workers[1].pid, stage.workers[2].pid, stage.workers[2].attempt) == (101, 0, 1)
    assert not stage.forked(2, 102)  # that is the attempt's business now
    assert "forget" not in stage.told  # one of them may not have opened its file yet


def test_who_failed_or_ended_is_ordered_again(monkeypatch):
    monkeypatch.setattr("agent.workers.processes.signal_group", lambda *_: None)
    stage = prepared()
    assert stage.failed(1)
    assert stage.forked(2, 102)
    assert stage.newcomers.ended(102, -9)
    assert not stage.newcomers.ended(103, 0)
    assert stage.begin() == ([], [1, 2])
    assert stage.discarded == [1, 2]  # what they wrote is not of those that come


def test_who_was_dead_when_it_was_announced():
    stage = prepared()
    assert stage.forked(1, 101, exit_code=1)
    assert stage.forked(2, 102)
    found, added = stage.begin()
    assert ([worker.rank for worker in found], added) == ([2], [1])


def test_who_dies_in_the_meantime_is_one_of_more():
    stage = prepared()
    stage.forked(1, 101)
    stage.forked(2, 102)
    found, added = stage.begin(do.ReplaceRanks(1, (), (0, 1, 2), "/m", 5, "all"))
    assert ([worker.rank for worker in found], added) == ([1, 2], [0])


def test_what_is_of_another_attempt_is_none_of_theirs():
    stage = prepared()
    assert not stage.forked(1, 101, attempt=0)
    assert not stage.failed(1, attempt=2)
    assert not stage.forked(0, 100)


def test_why_one_that_exists_will_leave_is_no_news():
    stage = prepared()
    stage.forked(1, 101)
    assert stage.failed(1)
    assert [worker.rank for worker in stage.begin()[0]] == [1]


def test_who_is_not_wanted_is_killed(monkeypatch):
    killed = []
    monkeypatch.setattr("agent.workers.processes.signal_group", lambda pid, _: killed.append(pid))
    stage = prepared()
    stage.forked(1, 101)
    stage.newcomers.clear()
    assert killed == [101]
    assert stage.told[-1] == "forget"
    assert stage.discarded == [1, 2]
    assert not stage.newcomers.is_awaited
    assert not stage.forked(2, 102)
