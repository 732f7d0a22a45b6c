"""When the present state of a job is told: news at once, changes together."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from agent.controller.states import JobState
from agent.supervisor.status import PUBLISH_S, REFRESH_S, StatusPublisher


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
