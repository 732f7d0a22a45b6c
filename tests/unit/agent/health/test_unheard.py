"""Nodes that do not answer are said once, together."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest

from agent.health.unheard import LOOK_S, UnheardNodes
from agent.nodes.line import Line, Pulse, bytes_of
from agent.nodes.link import NodeLink
from agent.nodes.run_messages import Wake


class Nodes:
    """Some nodes, for how long nothing was heard of each, and what was said."""

    def __init__(self, count):
        self.silent_s = [0.3] * count
        nodes = [
            SimpleNamespace(
                name=f"node {at}", line=SimpleNamespace(unheard_s=lambda at=at: self.silent_s[at])
            )
            for at in range(count)
        ]
        self.said = []
        self.unheard = UnheardNodes(nodes, self.said.append)

    def look(self, *silent_s):
        self.silent_s[:] = silent_s
        self.unheard.look()
        said = self.said.copy()
        self.said.clear()
        return said


def test_a_node_that_is_silent_for_long_is_said_once_and_again_when_it_was_heard_meanwhile():
    nodes = Nodes(2)
    one = ["node 1 has not answered for 5 s: after 10 s it counts as lost"]
    assert [nodes.look(0.2, each) for each in (4.9, 5.9, 6.9, 8.9)] == [[], one, [], []]
    assert [nodes.look(0.2, each) for each in (0.1, 4.9, 5.9)] == [[], [], one]


def test_what_befell_several_is_one_sentence():
    nodes = Nodes(3)
    assert nodes.look(5.2, 1.1, 4.3) == [
        "node 0, node 2 have not answered for 5 s: after 10 s they count as lost"
    ]
    assert nodes.look(6.2, 2.1, 5.3) == []
    assert nodes.look(7.2, 5.1, 6.3) == [
        "node 1 has not answered for 5 s: after 10 s it counts as lost"
    ]


def test_of_many_some_are_named():
    (said,) = Nodes(1000).look(*[6.0] * 1000)
    assert said.startswith("node 0, node 1, node 2, node 3 and 996 more have not answered")


@pytest.mark.parametrize("count", [0, 1])
def test_it_looks_each_second_until_it_is_closed_and_never_without_other_nodes(count):
    due = []

    def later(seconds, call):
        due.append((seconds, call))
        return SimpleNamespace(cancel=due.clear)

    nodes = Nodes(count)
    nodes.unheard.attach(SimpleNamespace(call_later=later))
    nodes.silent_s[:] = [6.0] * count
    for _ in range(2 * count):
        ((seconds, call),) = due
        due.clear()
        assert seconds == LOOK_S
        call()
    assert (len(due), len(nodes.said)) == (count, count)
    nodes.unheard.close()
    assert due == []


def test_the_kernel_is_not_asked_how_long_whoever_spoke_was_silent(monkeypatch):
    asked = []
    monkeypatch.setattr(Pulse, "unheard_s", lambda _: asked.append(1) or 3.0)
    one, other = socket.socketpair()
    link, loop = NodeLink(Line(one)), asyncio.new_event_loop()
    link.attach(loop, lambda _: None, lambda _: None)
    other.sendall(bytes_of(Wake(3)))
    link.catch_up()
    assert (link.unheard_s(), asked) == (0, [])
    assert (link.unheard_s(), asked) == (3, [1])  # it has said nothing since
    link.close()
    other.close()
    loop.close()
