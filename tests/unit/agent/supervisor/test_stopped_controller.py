"""A msrun that is stopped, as another node finds it: the controller's, or its own."""

import time
from types import SimpleNamespace

import pytest

from agent.health import mute_controller
from agent.nodes.line import CALM, CLOSED, Loss, LossKind
from agent.nodes.messages import StillThere


@pytest.mark.parametrize(
    ("stood_s", "woken_s", "is_proven"),
    [(9, 0, True), (11, 0, False), (11, 0.5, False), (11, 2, True)],
)
def test_a_msrun_that_was_stopped_for_long_may_have_been_given_up(
    node, monkeypatch, stood_s, woken_s, is_proven
):
    """It took a line that was closed for the end of a job that went on without it."""
    now_s = [node.loop.time()]
    monkeypatch.setattr(node.loop, "time", lambda: now_s[0])
    node.controller._beats.tell()
    now_s[0] += stood_s
    if woken_s:
        node.controller._beats.tell()
        now_s[0] += woken_s
    node.link.lose()
    assert [each[2] for each in node.hooks.log if each[0] == "forsaken"] == [is_proven]


def test_a_controller_that_says_nothing_counts_as_lost_and_may_be_continued(node, monkeypatch):
    controller, now_s = node.controller, time.monotonic()
    controller._mute._patience = lambda: CALM
    monkeypatch.setattr(mute_controller, "time", SimpleNamespace(monotonic=lambda: now_s))
    node.link.hear(StillThere())
    now_s += CALM * 10.0 - 0.1
    controller._mute.look()
    assert node.hooks.log == []
    now_s += 0.1
    controller._mute.look()
    assert not node.link.is_open
    assert [each[2] for each in node.hooks.log if each[0] == "forsaken"] == [False]
    assert node.losses[0][0] == Loss(LossKind.MUTE, "has said nothing for 30 s")
    assert node.hooks.is_in_doubt == controller._mute.is_in_doubt


@pytest.mark.parametrize(("late_s", "is_silent"), [(2.0, False), (7.0, True)])
def test_nodes_that_have_gone_while_the_controller_was_stopped_may_go_on_without_it(
    cluster, late_s, is_silent
):
    """It took that for their end, and waited for others in their places."""
    cluster.start(3)
    cluster.all._mute._due_real_s -= late_s
    cluster.links[0].lose(CLOSED)
    said = "is silent: its msrun closed the line while this one was stopped"
    assert cluster.said == [
        f"node 1 (b) {said if is_silent else 'is gone: its msrun closed the line'}"
    ]


def test_who_waits_beside_a_controller_that_is_outvoted_looks_for_the_others(cluster, monkeypatch):
    cluster.start(3)
    farewells = []
    monkeypatch.setattr(cluster.all._door, "close", farewells.append)
    cluster.all._give_up_all("more than half are silent")
    cluster.all.going_on._give_up("more than half are silent")
    assert cluster.all.going_on.is_outvoted
    cluster.all.finish()
    assert farewells == [None]
