"""A controller's msrun that says nothing is given up by all other nodes at the same moment."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import pytest

from agent.health import mute_controller
from agent.health.mute import LOOK_S, MUTE_S
from agent.health.mute_controller import MuteController
from agent.health.signs_of_life import SAY_S, SignsOfLife
from agent.nodes.line import CALM, LIMIT_S, VERY_CALM
from agent.nodes.messages import StillThere


class Line:
    def __init__(self, node):
        self.node, self.heard_s, self.unread, self.is_cut = node, node.now_s, False, False

    def mute_s(self):
        return self.node.now_s - self.heard_s

    def catch_up(self):
        if self.unread:
            self.node.hear()

    def is_in_doubt(self):
        return self.is_cut


class Node:
    """With a clock, and a timer."""

    def __init__(self, monkeypatch):
        self.now_s, self.said, self.lost, self.due = 100.0, [], [], []
        self.patience, self.who = CALM, SimpleNamespace(rank=0, host="a", pid=7)
        monkeypatch.setattr(mute_controller, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.line = Line(self)
        about = self.lose, lambda: self.patience, lambda: self.who
        self.mute = MuteController(self.line, self.said.append, *about)
        self.mute.attach(SimpleNamespace(call_later=self.later))

    def later(self, seconds, call):
        assert 0 < seconds <= LOOK_S
        self.due.append((self.now_s + seconds, call))
        return SimpleNamespace(cancel=self.due.clear)

    def hear(self):
        self.line.heard_s = self.now_s
        self.mute.hear()

    def lose(self, why):
        self.lost.append((round(self.now_s - self.line.heard_s, 1), why))
        self.mute.close()

    def look(self, late_s=0.0):
        ((when_s, call),) = self.due
        self.due.clear()
        self.now_s = when_s + late_s
        call()

    def until_lost(self, most=200):
        for _ in range(most):
            if self.lost or not self.due:
                break
            self.look()
        return self.lost


@pytest.fixture
def node(monkeypatch):
    return Node(monkeypatch)


@pytest.mark.parametrize("heard_before_s", [0.0, 0.3, 0.999])
def test_it_is_given_up_exactly_at_the_limit_which_is_that_of_all_nodes(node, heard_before_s):
    node.now_s -= heard_before_s
    node.hear()
    node.now_s += heard_before_s
    assert node.until_lost() == [(CALM * LIMIT_S, "has said nothing for 30 s")]
    assert node.said == [
        (
            "node 0 (a) answers, but its msrun has said nothing for 5 s: if it is stopped, "
            "continue it there (kill -CONT 7); after 30 s the node counts as lost"
        )
    ]
    assert node.due == []


def test_where_nobody_goes_on_without_it_there_is_more_time_to_continue_it(node):
    node.patience, node.who = VERY_CALM, None
    assert node.until_lost() == [(VERY_CALM * LIMIT_S, "has said nothing for 2 min 0 s")]
    assert node.said[0].startswith("the controller's node answers, but its msrun has said nothing")


def test_where_nothing_would_be_saved_nobody_gives_it_up(node):
    node.patience = inf
    assert node.until_lost() == []
    assert node.said[0].endswith("; nothing is decided until then")


def test_one_that_speaks_is_not_given_up_and_is_said_anew_the_next_time(node):
    for _ in range(3):
        while len(node.said) == 0:
            node.look()
        node.said.clear()
        node.hear()
        node.look()
    assert node.lost == []


def test_what_lies_unread_is_heard_first(node):
    node.line.unread = True
    assert node.until_lost() == []


def test_other_words_than_that_one_go_to_single_nodes_and_do_not_count(node):
    """Else not all nodes would give it up at the same moment."""
    while not node.lost:
        node.line.heard_s = node.now_s
        node.look()
    assert node.now_s - node.mute._heard_s == pytest.approx(CALM * LIMIT_S, abs=0.1)


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_a_late_look_does_not_begin_the_count_anew(node, late_s):
    for _ in range(25):
        node.look()
    node.look(late_s)
    assert node.until_lost()[0][0] == CALM * LIMIT_S


def test_a_machine_that_was_stopped_itself_may_have_heard_nothing(node):
    node.look(late_s=100.0)
    assert node.lost == []
    assert len(node.said) == 0
    woken_s = node.now_s
    assert len(node.until_lost()) == 1
    assert node.now_s - woken_s == pytest.approx(2 * SAY_S, abs=LOOK_S)


def test_no_update_begins_without_it_meanwhile(node):
    assert not node.mute.is_in_doubt()
    node.now_s += MUTE_S + 0.1
    assert node.mute.is_in_doubt()
    node.line.heard_s = node.now_s
    assert not node.mute.is_in_doubt()
    node.line.is_cut = True
    assert node.mute.is_in_doubt()


def test_it_does_not_look_once_it_is_closed_and_not_twice_for_a_line_that_is_opened_anew(node):
    node.mute.attach(SimpleNamespace(call_later=node.later))
    assert len(node.due) == 1
    node.mute.close()
    assert node.due == []


def test_the_controller_says_again_and_again_that_it_is_there():
    said, due = [], []
    node = SimpleNamespace(pass_on=lambda message: said.append(("node", message)))
    signs = SignsOfLife([node], lambda message: said.append(("spare nodes", message)))
    signs.close()

    def later(seconds, call):
        assert seconds == SAY_S < MUTE_S * 2 < LIMIT_S / 2
        due.append(call)
        return SimpleNamespace(cancel=due.clear)

    signs.attach(SimpleNamespace(call_later=later))
    for _ in range(2):
        due.pop()()
    assert said == [("node", StillThere()), ("spare nodes", StillThere())] * 2
    signs.close()
    assert due == []
