"""Lines to thousands of nodes: what is said in one turn of the loop is sent at its end."""

import asyncio
import socket

import pytest
from support.stand_ins import turn

from agent.nodes.frames import FrameError
from agent.nodes.line import Line
from agent.nodes.link import NodeLink
from agent.nodes.run_messages import ShownStatus


class Loop(asyncio.SelectorEventLoop):
    """Counts what it is asked to call soon."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def call_soon(self, callback, *args, **about):
        self.asked += 1
        return super().call_soon(callback, *args, **about)


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def ends(loop):
    """Two links that are connected, each with what it has heard."""
    both = [(NodeLink(Line(end)), []) for end in socket.socketpair()]
    for link, heard in both:
        link.attach(loop, heard.append, heard.append)
    turn(loop)  # now both have begun
    yield both
    for link, _ in both:
        link.close()


def noted(number):
    return ShownStatus({"number": number})


def test_the_loop_is_asked_once_however_many_lines_are_spoken_to(ends, loop):
    (one, heard), (other, heard_there) = ends
    before, said = loop.asked, [noted(number) for number in range(3)]
    for message in said:
        one.send(message)
        other.send(message)
    assert loop.asked - before == 1
    turn(loop)
    assert heard == heard_there == said


def test_a_line_that_cannot_be_told_something_keeps_no_other_from_it(ends, loop, monkeypatch):
    (one, heard), (other, _) = ends
    failures = []
    loop.set_exception_handler(lambda _, about: failures.append(str(about["exception"])))

    def too_large():
        raise FrameError("too large")

    monkeypatch.setattr(one, "end_turn", too_large)
    one.send(noted(1))
    other.send(noted(2))
    turn(loop)
    assert heard == [noted(2)]
    assert failures == ["too large"]
    monkeypatch.undo()
