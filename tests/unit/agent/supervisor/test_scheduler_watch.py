"""Workers without a scheduler look for it, and whether ranks elsewhere have begun to save."""

import socket
from queue import Empty, SimpleQueue
from types import SimpleNamespace

import pytest

from agent.nodes.join import NeverBegunError, NobodyThereError, RefusedError
from agent.supervisor import scheduler_watch as module
from agent.supervisor.scheduler_watch import NotesWatch, SchedulerWatch

LONG_S = 60


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    monkeypatch.setattr(module, "REFUSED_S", 0.01)


class Loop:
    """Calls wait until the test makes them."""

    def __init__(self):
        self.calls = SimpleQueue()

    def soon(self, call, *about):
        self.calls.put((call, about))

    def turn(self):
        call, about = self.calls.get(timeout=LONG_S)
        call(*about)


def line():
    closed = []
    connection = SimpleNamespace(close=lambda: closed.append(True))
    return SimpleNamespace(line=SimpleNamespace(connection=connection), closed=closed)


def dialled(*answers):
    left = iter(answers)

    def join(_opened):
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return join


def test_it_is_dialled_until_it_is_there():
    loop, found, said, there = Loop(), [], [], line()
    join = dialled(NobodyThereError(), NobodyThereError(), there)
    SchedulerWatch(join, loop.soon, found.append, said.append)
    loop.turn()
    assert (found, said, there.closed) == ([there], [], [])


def test_the_line_that_was_found_stays_open_when_it_is_closed():
    one, other = socket.socketpair()
    loop, there = Loop(), line()

    def join(opened):
        opened(one)
        return there

    watch = SchedulerWatch(join, loop.soon, lambda _: watch.close(), print)
    loop.turn()
    one.sendall(b"x")
    assert other.recv(1) == b"x"
    for each in (one, other):
        each.close()


def test_another_job_at_its_port_is_said_once():
    loop, found, said, there = Loop(), [], [], line()
    refused = RefusedError("other arguments", 2)
    join = dialled(refused, refused, NeverBegunError("too late"), there)
    SchedulerWatch(join, loop.soon, found.append, said.append)
    while not found:
        loop.turn()
    assert said == [
        "what is at the scheduler's port is none: other arguments",
        "what is at the scheduler's port is none: too late",
    ]


def test_what_comes_too_late_is_closed():
    loop, found, there = Loop(), [], line()
    watch = SchedulerWatch(dialled(there), loop.soon, found.append, found.append)
    call, about = loop.calls.get(timeout=LONG_S)
    watch.close()
    call(*about)
    assert (found, there.closed) == ([], [True])


def test_a_closed_loop_wants_nothing():
    def closed(*_):
        raise RuntimeError("Event loop is closed")

    watch = SchedulerWatch(dialled(line()), closed, print, print)
    watch.close()


def test_the_first_notes_of_ranks_elsewhere_are_seen_once(tmp_path):
    loop, begun = Loop(), []
    watch = NotesWatch([tmp_path / "a", tmp_path / "b"], loop.soon, lambda: begun.append(1))
    (tmp_path / "b").mkdir()
    loop.turn()
    assert begun == [1]
    with pytest.raises(Empty):
        loop.calls.get(timeout=0.1)
    watch.close()


def test_nobody_is_told_who_does_not_want_to_know_any_more(tmp_path):
    loop, begun = Loop(), []
    (tmp_path / "a").mkdir()
    watch = NotesWatch([tmp_path / "a"], loop.soon, lambda: begun.append(1))
    call, about = loop.calls.get(timeout=LONG_S)
    watch.close()
    call(*about)
    assert begun == []


def test_who_waits_there_waits_no_longer_when_it_is_closed():
    one, other = socket.socketpair()
    heard = SimpleQueue()

    def join(opened):
        opened(one)
        heard.put("waits")
        heard.put(one.recv(1))
        raise NobodyThereError

    watch = SchedulerWatch(join, Loop().soon, print, print)
    assert heard.get(timeout=LONG_S) == "waits"
    watch.close()
    assert heard.get(timeout=LONG_S) == b""
    for each in (one, other):
        each.close()
