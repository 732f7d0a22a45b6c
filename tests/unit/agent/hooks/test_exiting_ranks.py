"""Ranks that want to leave are let go, unless a peer, a dump or a replacement needs them."""

from __future__ import annotations

import pytest

from agent.controller.states import JobState
from agent.hooks.exiting_ranks import LOOK_S, ExitingRanks
from worker_hooks.contract.protocol import Release

S = JobState


class Room:
    """Rank 0 trains; what ranks are told."""

    def __init__(self):
        self.released, self.training, self.timers, self.said = [], {0}, [], []
        self.used = {0: 0.0}  # processor seconds, by rank
        self.is_known = True
        self.exiting = ExitingRanks(self, self, self, self.training, self.said.append)
        self.exiting.attach(self.call_later)

    def send_all(self, ranks, message):
        assert isinstance(message, Release)
        self.released.extend(ranks)

    def are_known(self, _ranks):
        return self.is_known

    def use(self, rank):
        return "S", self.used[rank]

    def newest_step(self, _rank):
        return 5

    def call_later(self, _after_s, call):
        self.timers.append(call)
        return self

    def cancel(self):
        self.timers.clear()


@pytest.mark.parametrize(
    ("state", "is_done", "is_let_go"),
    [
        (S.RUNNING, True, False),  # it may hold the last step
        (S.RUNNING, False, False),  # it may flee a death that nobody has heard of
        (S.FREEZING, False, False),
        (S.COMMITTING, True, False),
        (S.REPLACING, True, False),  # it has to join the newcomers
        (S.REPLACING, False, True),  # and this one cannot
        (S.STOPPING, True, True),
    ],
)
def test_who_is_let_go(state, is_done, is_let_go):
    room = Room()
    room.exiting.decided(state)
    room.exiting.add(1, is_done=is_done)
    room.exiting.let_go()
    assert room.released == ([1] if is_let_go else [])
    assert room.exiting.has_finished(1) == (is_let_go and is_done)
    room.exiting.decided(S.STOPPING)
    assert room.released == [1]


def test_a_finished_rank_is_kept_as_long_as_another_works_and_that_is_said_once():
    room = Room()
    room.exiting.decided(S.RUNNING)
    for rank in (1, 2):
        room.exiting.add(rank, is_done=True)
    room.exiting.let_go()
    for _ in range(1000):
        room.used[0] += 1.0
        (look,) = room.timers
        room.timers.clear()
        look()
    assert room.released == []
    assert room.said == ["ranks 1-2 finished training and wait: they hold the last step for rank 0"]
    room.training.clear()  # it wants to exit, too
    room.exiting.let_go()
    assert room.released == [1, 2]


def test_who_is_not_heard_of_is_not_taken_to_be_idle():
    room = Room()
    room.exiting.decided(S.RUNNING)
    room.exiting.add(1, is_done=True)
    room.is_known = False  # the last that was heard stands still
    for _ in range(60):
        room.timers.pop()()
    assert room.released == []


def test_a_finished_rank_is_let_go_when_the_others_only_seem_to_wait_for_its_end():
    room = Room()
    room.exiting.decided(S.RUNNING)
    room.exiting.add(1, is_done=True)
    for idle_s in (570.0, 600.0):
        room.used[0] += 10.0
        for _ in range(1 + int(idle_s / LOOK_S)):
            assert room.released == []
            room.timers.pop()()
    assert room.released == [1]
    assert room.timers == []
    assert "rank 0 did nothing for 600 s: rank 1 may exit" in room.said[-1]
    room.exiting.clear()  # the next attempt
    room.exiting.add(1, is_done=True)
    room.exiting.let_go()
    assert (room.released, len(room.timers)) == ([1], 1)


def test_who_leaves_amid_training_waits_a_moment_for_a_death_to_be_heard_of():
    room = Room()
    room.exiting.decided(S.RUNNING)
    room.exiting.add(1, is_done=False)
    room.exiting.let_go()
    assert room.released == []
    room.timers.pop()()
    assert room.released == [1]
    room.exiting.add(2, is_done=False)
    room.exiting.decided(S.FREEZING)  # there was one
    room.timers.pop()()
    assert room.released == [1]
    room.exiting.decided(S.RUNNING)
    room.exiting.add(3, is_done=False)
    room.training.clear()  # nobody is left who could need it
    room.exiting.let_go()
    assert room.released == [1, 2, 3]


def test_who_trains_again_is_not_let_go_for_what_it_wanted_before():
    room = Room()
    room.exiting.decided(S.REPLACING)
    room.exiting.add(1, is_done=True)
    room.exiting.take_back(1)
    room.exiting.decided(S.RUNNING)
    assert room.released == []
    room.exiting.add(1, is_done=True)
    room.exiting.agreed = 6
    room.exiting.let_go()
    assert room.released == [1]  # it is in the way of a graceful exit
    room.exiting.clear()
    assert not room.exiting.has_finished(1)
    assert room.timers == []
