"""When the present state of a job is told: news at once, changes together."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from agent.controller.states import JobState
from agent.supervisor import status as module
from agent.supervisor.status import (
    MOST_BUSY,
    MOST_SHOWN,
    PUBLISH_S,
    REFRESH_S,
    SHOWN_S,
    ShownNodes,
    StatusPublisher,
)


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time is told to it."""

    now = 100.0

    def time(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + PUBLISH_S / 4, end)
            for _ in range(2):
                self.call_soon(self.stop)
                self.run_forever()


@pytest.fixture
def loop() -> Iterator[Clock]:
    loop = Clock()
    yield loop
    loop.close()


def publisher(
    loop: Clock, *, grows_old: Callable[[], bool] = lambda: False
) -> tuple[StatusPublisher, list[float]]:
    told: list[float] = []

    def tell() -> bool:
        told.append(round(loop.now - Clock.now, 3))
        return grows_old()

    return StatusPublisher(loop, tell, lambda: None), told


def test_a_new_state_is_told_at_once(loop):
    one, told = publisher(loop)
    for state in (JobState.STARTING, JobState.RUNNING, JobState.DUMPING, JobState.REPLACING):
        one.changed(state)
    assert told == [0, 0, 0, 0]
    loop.pass_by(5)
    assert told == [0, 0, 0, 0]


def test_changes_within_a_state_are_told_together(loop):
    one, told = publisher(loop)
    one.changed(JobState.STARTING)
    for _ in range(40):
        one.changed(JobState.STARTING)
    assert told == [0]
    loop.pass_by(5)
    assert told == [0, PUBLISH_S]
    one.changed(JobState.STARTING)
    loop.pass_by(PUBLISH_S / 2)
    assert len(told) == 3  # long after the last


def test_news_take_what_waits_with_them(loop):
    one, told = publisher(loop)
    one.changed(JobState.STARTING)
    one.changed(JobState.STARTING)
    one.changed(JobState.RUNNING)
    loop.pass_by(5)
    assert told == [0, 0]


def test_what_grows_old_is_told_anew(loop):
    is_training = True
    one, told = publisher(loop, grows_old=lambda: is_training)
    one.changed(JobState.RUNNING)
    loop.pass_by(2 * REFRESH_S + PUBLISH_S)
    assert told == [0, REFRESH_S, 2 * REFRESH_S]
    one.changed(JobState.RUNNING)  # a change does not wait until then
    loop.pass_by(PUBLISH_S)
    assert len(told) == 4
    is_training = False
    loop.pass_by(3 * REFRESH_S)
    assert len(told) == 5


def test_nothing_after_the_end_waits(loop):
    one, told = publisher(loop)
    one.changed(JobState.FAILED)
    one.changed(JobState.FAILED)
    assert told == [0, 0]


DEAR_S = 0.1  # of processor time, for what has very many ranks


class DearClock:
    """Tells a thread's processor time; whoever publishes takes some."""

    now = 0.0

    def thread_time(self) -> float:
        return self.now


@pytest.fixture
def dear(loop, monkeypatch):
    """What takes long to publish: its publisher, when all was told, and when a state was."""
    clock, told, states = DearClock(), [], []
    monkeypatch.setattr(module, "time", clock)

    def tell() -> bool:
        clock.now += DEAR_S
        told.append(round(loop.now - Clock.now, 3))
        return False

    one = StatusPublisher(loop, tell, lambda: states.append(round(loop.now - Clock.now, 3)))
    one.changed(JobState.RUNNING)
    assert told.pop() == 0
    return one, told, states


def test_a_new_state_is_told_at_once_without_ranks_that_take_long(dear, loop):
    one, told, states = dear
    for state in (JobState.FREEZING, JobState.REPLACING, JobState.RUNNING):
        one.changed(state)
        loop.pass_by(1)
    assert (told, states) == ([], [0, 1, 2])
    loop.pass_by(10)
    assert told == [pytest.approx(2 + DEAR_S / MOST_BUSY, abs=PUBLISH_S)]


def test_states_that_change_all_the_time_do_not_hide_the_ranks_for_ever(dear, loop):
    one, told, states = dear
    for at in range(30):
        one.changed((JobState.FREEZING, JobState.RUNNING)[at % 2])
        loop.pass_by(1)
    assert len(states) == 30
    assert told[0] == pytest.approx(SHOWN_S, abs=PUBLISH_S)
    assert len(told) >= 2


def test_the_end_is_told_with_all_ranks_at_once(dear):
    one, told, states = dear
    one.changed(JobState.FAILED)
    assert (told, states) == ([0], [])


def shown_nodes(loop: Clock, count: int) -> tuple[ShownNodes, list[tuple[float, list[int], int]]]:
    """Two nodes, with as many ranks."""
    shown: list[tuple[float, list[int], int]] = []

    def show(status: dict[str, object], step: int) -> None:
        ranks = [each["rank"] for each in status["workers"]]
        shown.append((round(loop.now - Clock.now, 3), ranks, step))

    each = [SimpleNamespace(ranks=range(at, at + 2), show=show) for at in (0, 2)]
    nodes = ShownNodes(loop, each)
    nodes.show({"workers": [{"rank": rank, "step": rank} for rank in range(count)]})
    return nodes, shown


def test_other_nodes_are_shown_all_ranks_at_once(loop):
    _, shown = shown_nodes(loop, 4)
    assert shown == [(0, [0, 1, 2, 3], 3)] * 2


def test_of_very_many_ranks_a_node_is_shown_its_own_and_later_and_the_newest(loop):
    count = MOST_SHOWN + 1
    nodes, shown = shown_nodes(loop, count)
    loop.pass_by(1)
    assert shown == []
    nodes.show({"workers": [{"rank": rank, "step": 7} for rank in range(count)]})
    loop.pass_by(SHOWN_S)
    assert [each[1:] for each in shown] == [([0, 1], 7), ([2, 3], 7)]
    assert shown[0][0] == pytest.approx(SHOWN_S, abs=PUBLISH_S)
    nodes.show({"workers": [{"rank": rank} for rank in range(count)]})
    loop.pass_by(SHOWN_S + 1)
    assert [each[2] for each in shown[2:]] == [0, 0]


@pytest.mark.parametrize("state", ["freezing", "dumping", "committing", "replacing"])
def test_very_many_nodes_are_not_shown_a_replacement_unless_it_takes_long(loop, state):
    count = MOST_SHOWN + 1
    nodes, shown = shown_nodes(loop, count)

    def go_on(state):
        nodes.show({"state": state, "workers": [{"rank": rank} for rank in range(count)]})

    go_on(state)
    loop.pass_by(SHOWN_S + 2)
    assert shown == []
    go_on("running")
    loop.pass_by(2)
    assert len(shown) == 2
    go_on(state)
    loop.pass_by(2 * SHOWN_S + 2)
    assert len(shown) == 4
