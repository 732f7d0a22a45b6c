"""A msrun that is stopped, as another node finds it: the controller's, or its own."""

import time
from types import SimpleNamespace

import pytest

from agent.health import mute, mute_controller
from agent.nodes.line import CALM, CLOSED, VERY_CALM, LossKind
from agent.nodes.run_messages import NodeFacts


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


@pytest.mark.parametrize(
    ("nodes", "term", "has_hooks", "dead", "times"),
    [
        (2, "", True, (), VERY_CALM),
        (2, "t", True, (), CALM),
        (3, "", True, (), CALM),
        (3, "", False, (), 1e9),
        (3, "", False, (2,), VERY_CALM),
    ],
)
def test_a_controller_that_says_nothing_counts_as_lost_and_may_be_continued(
    node, monkeypatch, nodes, term, has_hooks, dead, times
):
    """Behind the same time on all nodes, so that their ranks save together."""
    controller = node.controller
    controller.nodes = tuple(NodeFacts(at, f"mn{at}", "", 1, 70 + at) for at in range(nodes))
    controller.term = term
    controller.view = controller.view._replace(has_hooks=has_hooks)
    monkeypatch.setattr(type(controller), "_dead", dead)
    now_s = time.monotonic()
    monkeypatch.setattr(mute_controller, "time", SimpleNamespace(monotonic=lambda: now_s + 1e6))
    controller._mute._due_s = now_s + 1e6
    node.link.silent_s = times * 10.0 - 0.5
    controller._mute._look_again()
    assert node.hooks.log == []
    if times == 1e9:
        return
    node.link.silent_s += 0.5
    controller._mute._due_s = now_s + 1e6
    controller._mute._look_again()
    assert not node.link.is_open
    assert [each[2] for each in node.hooks.log if each[0] == "forsaken"] == [False]
    assert node.losses[0][0].kind is LossKind.MUTE
    assert node.hooks.is_in_doubt == controller._mute.is_in_doubt


@pytest.mark.parametrize(("late_s", "is_silent"), [(2.0, False), (6.0, True)])
def test_nodes_that_have_gone_while_the_controller_was_stopped_may_go_on_without_it(
    cluster, monkeypatch, late_s, is_silent
):
    """It took that for their end, and waited for others in their places."""
    cluster.start(3)
    now_s = time.monotonic() + late_s
    monkeypatch.setattr(mute, "time", SimpleNamespace(monotonic=lambda: now_s))
    cluster.all._mute._due_s = now_s - late_s
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
