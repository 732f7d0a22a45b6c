"""One store host an attempt: never two, and the job is told if there can be none."""

from __future__ import annotations

import socket

import pytest

from agent.workers import store_client
from agent.workers.store_client import DEATHS, StoreClient
from worker_hooks.contract.protocol import StoreForked

KILLED = StoreForked(0, 0, "it was killed before it began")


class Timer:
    def __init__(self, loop, call):
        self.loop, self.call = loop, call
        loop.timers.append(self)

    def cancel(self):
        self.loop.timers.remove(self)


class Loop:
    """Timers and readers that a test fires by hand."""

    def __init__(self):
        self.timers, self.readers = [], {}

    def call_later(self, _after_s, call):
        return Timer(self, call)

    def add_reader(self, fd, call):
        assert fd not in self.readers
        self.readers[fd] = call

    def remove_reader(self, fd):
        del self.readers[fd]

    def knock(self):
        (call,) = self.readers.values()
        call()

    def pass_time(self):
        timers, self.timers = self.timers, []
        for timer in timers:
            timer.call()


class Stage:
    def __init__(self, listener):
        self.loop, self.orders, self.given_up, self.ended = Loop(), 0, [], []
        self.store = StoreClient(listener, self.loop, self.order, self.given_up.append)
        self.listener = listener
        self.store.begin(listener)

    def order(self):
        self.orders += 1


@pytest.fixture
def stage(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stage = Stage(listener)
        monkeypatch.setattr(store_client, "end_child", lambda pid, _: stage.ended.append(pid))
        yield stage


def test_a_store_that_never_begins_is_tried_again_and_then_given_up(stage):
    for _ in range(DEATHS):
        stage.loop.knock()
        stage.store.on_forked(KILLED)
        assert stage.given_up == []
        stage.loop.pass_time()
    stage.loop.knock()
    stage.store.on_forked(KILLED)
    assert (stage.orders, stage.given_up) == (DEATHS + 1, [KILLED.why])
    assert (stage.loop.timers, stage.loop.readers) == ([], {})


def test_stores_that_served_and_died_are_no_reason_to_end_a_job_that_trains(stage):
    stage.loop.knock()
    stage.store.on_forked(StoreForked(0, 7))
    stage.store.on_exit()
    for _ in range(DEATHS):
        stage.loop.pass_time()
        stage.loop.knock()
        stage.store.on_forked(KILLED)
    assert stage.orders == DEATHS + 1
    assert stage.given_up == []


def test_a_second_answer_for_a_store_that_introduced_itself_leads_to_no_second_store(stage):
    stage.loop.knock()
    stage.store.on_forked(StoreForked(0, 7))
    stage.store.on_forked(KILLED)
    assert stage.store.is_serving
    stage.store.on_exit()
    stage.loop.pass_time()
    stage.loop.knock()
    stage.store.on_forked(KILLED)  # so late that another one is ordered
    stage.store.on_forked(StoreForked(0, 8))
    stage.loop.pass_time()
    assert (stage.store.pid, stage.store.is_serving, stage.orders) == (8, True, 2)
    assert stage.loop.readers == {}


@pytest.mark.parametrize(("answer", "ended"), [(KILLED, []), (StoreForked(0, 7), [7])])
def test_the_answer_to_an_order_of_an_attempt_that_is_over_comes_first(stage, answer, ended):
    stage.loop.knock()
    stage.store.end()
    stage.store.begin(stage.listener)
    assert stage.store.is_changing
    stage.store.on_forked(answer)
    assert stage.ended == ended
    stage.loop.knock()
    stage.store.on_forked(StoreForked(1, 9))
    assert (stage.store.pid, stage.store.is_serving) == (9, True)
