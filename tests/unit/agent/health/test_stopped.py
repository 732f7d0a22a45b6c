"""Ranks that are stopped where no hang is looked for; time and processes are made up."""

import time
from types import SimpleNamespace

import pytest

from agent.controller import events as ev
from agent.controller.states import JobState
from agent.health.stopped import JOINS, LONG_LOOKS, LOOKS, StoppedRanks
from agent.workers.worker import Worker

RANKS = (0, 1, 2)


class Room:
    """What a watch is given, and what it posted."""

    def __init__(self):
        self.now, self.timer, self.posted = time.monotonic(), None, []
        self.states = dict.fromkeys(RANKS, "S")
        self.workers = {rank: Worker(rank, rank, 1) for rank in RANKS}
        for rank, worker in self.workers.items():
            worker.pid = rank + 10
        loop = SimpleNamespace(time=lambda: self.now, call_at=self._call_at)
        self.said, self.finished, self.woken, self.are_known = [], set(), [], True
        services = SimpleNamespace(
            loop=loop,
            post=self.posted.append,
            say=self.said.append,
            journal=SimpleNamespace(event=lambda name, **_: self.said.append(name)),
        )
        self.watch = StoppedRanks(
            RANKS,
            SimpleNamespace(
                use=lambda rank, _: (self.states[rank], 0.0),
                are_known=lambda _: self.are_known,
                are_here=lambda _: True,
            ),
            self.workers.get,
            self.finished,
            self.woken.append,
            services,
        )

    def _call_at(self, at_s, callback):
        self.timer = (at_s, callback)
        return SimpleNamespace(cancel=lambda: setattr(self, "timer", None))

    def look(self, times=1, late_s=0.0):
        for _ in range(times):
            at_s, callback = self.timer
            self.now = at_s + late_s
            callback()


@pytest.fixture
def room():
    room = Room()
    room.watch.watch(JobState.REPLACING)
    return room


def test_a_rank_that_stays_stopped_is_given_up_and_the_report_will_say_who_killed_it(room):
    room.states[2] = "T"
    room.look(LOOKS - 1)
    assert room.posted == []
    room.look()
    assert room.posted == [ev.RankUnreachable(2, 1, JOINS)]
    assert room.workers[2].hung == JOINS


def test_so_is_a_newcomer_that_has_not_spoken_yet(room):
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


def leave(room, *ranks):
    room.finished |= {*ranks}
    room.watch.watch(JobState.RUNNING)


def test_a_rank_that_is_stopped_on_its_way_out_is_continued(room):
    """Nobody waits for it but msrun, which has no other deadline for a script's end."""
    leave(room, 0, 2)
    room.states[2] = "T"
    room.look(LOOKS - 1)
    assert room.woken == []
    room.look()
    assert (room.woken, room.posted) == ([2], [])
    assert room.said[0] == "ExitContinued"
    assert "rank 2 is stopped by a signal on its way out" in room.said[1]


def test_so_is_the_last_one_and_again_if_it_is_stopped_again(room):
    leave(room, *RANKS)
    for rank in (0, 1):
        room.workers[rank].exit_code = 0
    room.states[2] = "T"
    room.look(2 * LOOKS)
    assert room.woken == [2, 2]


def test_one_that_trains_is_left_to_the_hang_detection(room):
    leave(room, 0)
    room.states[2] = "T"
    room.look(9)
    assert (room.woken, room.posted) == ([], [])


def test_a_job_of_which_all_ranks_are_stopped_stays_so(room):
    leave(room, *RANKS)
    room.states = dict.fromkeys(RANKS, "T")
    room.look(9)
    assert room.woken == []


def test_people_are_told_once_of_an_end_that_takes_long(room):
    leave(room, 0, 1)
    room.workers[0].exit_code = 0
    room.look(LONG_LOOKS - 1)
    assert room.said == []
    room.look(LONG_LOOKS)
    (said,) = room.said
    assert "rank 1 finished training 60 s ago, but still exists" in said
    assert "--pid 11" in said
