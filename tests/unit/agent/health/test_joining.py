"""Ranks that are stopped while the others wait for them; time and processes are made up."""

import time
from types import SimpleNamespace

import pytest

from agent.controller import events as ev
from agent.controller.states import JobState
from agent.health import joining
from agent.health.joining import LOOKS, WHY, JoinWatch
from agent.workers.worker import Worker

RANKS = (0, 1, 2)


class Room:
    """What a watch is given, and what it posted."""

    def __init__(self, monkeypatch):
        self.now, self.timer, self.posted = time.monotonic(), None, []
        self.states = dict.fromkeys(RANKS, "S")
        self.workers = {rank: Worker(rank, rank, 1) for rank in RANKS}
        for rank, worker in self.workers.items():
            worker.pid = rank + 10
        self.linked = {rank: worker.pid for rank, worker in self.workers.items()}
        loop = SimpleNamespace(time=lambda: self.now, call_at=self._call_at)
        services = SimpleNamespace(loop=loop, post=self.posted.append)
        monkeypatch.setattr(joining, "process_use", lambda pid: (self.states[pid % 10], 0.0))
        self.watch = JoinWatch(RANKS, lambda rank: self.linked[rank], self.workers.get, services)

    def _call_at(self, at_s, callback):
        self.timer = (at_s, callback)
        return SimpleNamespace(cancel=lambda: setattr(self, "timer", None))

    def look(self, times=1, late_s=0.0):
        for _ in range(times):
            at_s, callback = self.timer
            self.now = at_s + late_s
            callback()


@pytest.fixture
def room(monkeypatch):
    room = Room(monkeypatch)
    room.watch.watch(JobState.REPLACING)
    return room


def test_a_rank_that_stays_stopped_is_given_up_and_the_report_will_say_who_killed_it(room):
    room.states[2] = "T"
    room.look(LOOKS - 1)
    assert room.posted == []
    room.look()
    assert room.posted == [ev.RankUnreachable(2, 1, WHY)]
    assert room.workers[2].hung == WHY


def test_so_is_a_newcomer_that_has_not_spoken_yet(room):
    room.linked[1] = 0
    room.states[1] = "T"
    room.look(LOOKS)
    assert [each.rank for each in room.posted] == [1]


def test_one_that_goes_on_is_not(room):
    room.states[2] = "T"
    room.look(LOOKS - 1)
    room.states[2] = "R"
    room.look()
    room.states[2] = "T"
    room.look(LOOKS - 1)
    assert room.posted == []


def test_if_all_are_stopped_a_person_did_it(room):
    room.states = dict.fromkeys(RANKS, "T")
    room.look(9)
    assert room.posted == []


def test_a_late_look_says_nothing(room):
    room.states[2] = "T"
    room.look(9, late_s=1.0)
    assert room.posted == []


def test_nobody_is_watched_who_is_gone_or_while_nobody_joins(room):
    room.states[2] = "T"
    room.workers[2].exit_code = -9
    room.look(LOOKS)
    room.workers[2].exit_code = None
    room.watch.watch(JobState.RUNNING)
    assert (room.posted, room.timer) == ([], None)
    room.watch.watch(JobState.REPLACING)
    room.look(LOOKS - 1)
    assert room.posted == []
