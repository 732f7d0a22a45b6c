"""A node whose msrun says nothing counts as lost; sooner while others wait for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agent.health import mute
from agent.health.heartbeats import WOKEN_S
from agent.health.mute import LATE_S, LOOK_S, MUTE_S, MuteNodes, is_mute
from agent.nodes.line import CALM


class Line:
    def __init__(self, nodes):
        self.nodes = nodes
        self.heard_s = self.doubted_s = 0.0
        self.unread = False  # something lies there
        self.is_open = True

    def mute_s(self):
        return self.nodes.now_s - self.heard_s if self.is_open else 0.0

    def catch_up(self):
        if self.unread:
            self.heard_s = self.nodes.now_s


class Nodes:
    """Some nodes of a job, of which each has a rank that lives, and a clock."""

    def __init__(self, count, monkeypatch):
        self.now_s, self.said, self.lost, self.is_calm = 100.0, [], [], True
        self.due = []
        self.slept_s = 0.0  # of the machine
        clocks = {"CLOCK_BOOTTIME": 7, "clock_gettime": lambda _: self.now_s + self.slept_s}
        monkeypatch.setattr(mute, "time", SimpleNamespace(monotonic=lambda: self.now_s, **clocks))
        self.all = [
            SimpleNamespace(
                name=f"node {at}",
                facts=SimpleNamespace(pid=1000 + at),
                line=Line(self),
                workers={at: SimpleNamespace(is_alive=True)},
            )
            for at in range(count)
        ]
        for each in self.all:
            each.line.heard_s = self.now_s
        self.mute = MuteNodes(self.all, self.said.append, self.lose, lambda: self.is_calm)
        self.mute.attach(SimpleNamespace(call_later=self.later))

    def later(self, seconds, call):
        self.due.append((seconds, call))
        return SimpleNamespace(cancel=self.due.clear)

    def lose(self, node, why):
        node.line.is_open = False
        self.lost.append((node.name, why))

    def look(self, late_s=0.0):
        ((seconds, call),) = self.due
        assert seconds == LOOK_S
        self.due.clear()
        self.now_s += seconds + late_s
        call()

    def seconds_until_lost(self, most=60):
        """While node 1 alone speaks."""
        for second in range(1, most):
            self.look()
            for each in self.all[1:]:
                each.line.heard_s = self.now_s
            if self.lost:
                return second
        return None


@pytest.fixture
def nodes(monkeypatch):
    return Nodes(2, monkeypatch)


def test_one_that_others_wait_for_is_lost_behind_the_limit(nodes):
    nodes.is_calm = False
    assert nodes.seconds_until_lost() == 10
    assert nodes.lost == [("node 0", "has said nothing for 10 s")]
    assert nodes.said == [
        (
            "node 0 answers, but its msrun has said nothing for 5 s: if it is stopped, continue it "
            "there (kill -CONT 1000); after 10 s the node counts as lost"
        )
    ]
    for _ in range(5):
        nodes.look()
    assert len(nodes.lost) == 1


def test_updates_that_wait_for_it_are_others_that_do(nodes):
    nodes.all[0].line.doubted_s = 1e9
    assert nodes.seconds_until_lost() == 10


def test_while_ranks_train_on_it_may_be_continued_for_longer(nodes):
    assert nodes.seconds_until_lost() == CALM * 10
    assert nodes.said[0].endswith("after 30 s the node counts as lost")


def test_one_that_speaks_again_is_said_anew_the_next_time(nodes):
    for _ in range(7):
        nodes.look()
    nodes.all[0].line.heard_s = nodes.now_s
    nodes.look()
    assert nodes.seconds_until_lost() == CALM * 10 - 1
    assert [text[:6] for text in nodes.said].count("node 0") == 2


def test_a_node_without_a_living_rank_need_not_say_anything(nodes):
    nodes.all[0].workers[0].is_alive = False
    assert nodes.seconds_until_lost() is None
    assert nodes.said == []


def test_what_lies_unread_is_heard_first(nodes):
    nodes.is_calm = False
    nodes.all[0].line.unread = True
    assert nodes.seconds_until_lost() is None


def test_a_msrun_that_was_stopped_itself_has_heard_nothing(nodes):
    nodes.is_calm = False
    nodes.look(late_s=40.0)
    assert (nodes.lost, nodes.said) == ([], [])
    assert nodes.seconds_until_lost() == 10
    nodes.look(late_s=LATE_S / 2)


def test_it_is_in_doubt_once_a_word_is_missing(nodes):
    node = nodes.all[0]
    nodes.now_s += MUTE_S - 0.1
    assert not is_mute(node, MUTE_S)
    nodes.now_s += 0.2
    assert is_mute(node, MUTE_S)
    node.line.is_open = False
    assert not is_mute(node, MUTE_S)


def test_it_looks_until_it_is_closed_and_never_without_other_nodes(nodes, monkeypatch):
    nodes.mute.close()
    assert nodes.due == []
    alone = Nodes(0, monkeypatch)
    assert alone.due == []
    alone.mute.close()


@pytest.mark.parametrize(("late_s", "was_stopped"), [(0.4, False), (4.0, False), (6.0, True)])
def test_it_knows_of_a_long_stop_of_this_process_until_what_came_meanwhile_is_heard(
    nodes, late_s, was_stopped
):
    assert not nodes.mute.was_stopped
    ((seconds, _),) = nodes.due
    nodes.now_s += seconds + late_s  # readers come before timers
    assert nodes.mute.was_stopped is was_stopped
    nodes.now_s -= seconds + late_s
    nodes.look(late_s)
    assert nodes.mute.was_stopped is was_stopped
    nodes.now_s += WOKEN_S
    assert not nodes.mute.was_stopped


def test_a_machine_that_has_slept_was_stopped_as_well(nodes):
    nodes.look()
    nodes.slept_s += 300.0
    assert nodes.mute.was_stopped
    nodes.look()
    assert nodes.mute.was_stopped
    nodes.look()
    assert not nodes.mute.was_stopped
