"""The controller's node is lost with its ranks, and another node decides from then on."""

from types import SimpleNamespace

import pytest

from agent.controller import events as ev
from agent.nodes.line import CLOSED, Loss, LossKind
from agent.nodes.run_messages import (
    Ended,
    JobKnown,
    NodeFacts,
    ToldAgain,
)

WHY = "the controller's node closed the line"


# --- another node has the part of the controller's --------------------------------------------------

NODES = tuple(NodeFacts(rank, f"mn{rank}", f"10.0.0.{rank}", 2, 9, door=77) for rank in range(3))


@pytest.fixture
def led(node):
    """The ranks of node 2 train in attempt 4, and those of node 0 with them."""
    node.looks = []

    def look(attempt, nodes, lost, found, too_late):
        watch = SimpleNamespace(attempt=attempt, nodes=nodes, lost=lost)
        watch.found, watch.too_late, watch.is_closed = found, too_late, False
        watch.close = lambda: setattr(watch, "is_closed", True)
        node.looks.append(watch)
        return watch

    node.why_not = ""

    def why_not(*_, is_calm):
        return node.why_not or ("" if is_calm else "not calm")

    node.controller._successors = SimpleNamespace(why_not=why_not, look=look)
    node.controller.nodes, node.controller._node_rank = NODES, 2
    node.link.hear(JobKnown("running", 4, True))
    node.here.log.clear()
    return node


def succeeded(led, head=1):
    """Node 1 decides from now on."""
    line = SimpleNamespace(connection=SimpleNamespace(getpeername=lambda: ("10.0.0.1", 1)))
    settings = {"head": head, "store_port": 4321}
    led.looks[-1].found(
        SimpleNamespace(line=line, roster=SimpleNamespace(nodes=NODES), settings=settings)
    )


def test_ranks_wait_for_another_controller(led):
    led.link.lose()
    assert [(each.attempt, each.lost) for each in led.looks] == [(4, 0)]
    assert (led.here.log, led.hooks.log, led.losses, led.said) == ([], [], [], [])
    assert led.hooks.is_brief
    assert led.controller.ending is None


@pytest.mark.parametrize("case", ["waits", "not running", "asked", "no ranks", "told why"])
def test_they_save_where_more_was_under_way(led, case):
    led.hooks.may_wait = case != "waits"
    led.why_not = "it may be alive" if case == "told why" else ""
    if case == "not running":
        led.link.hear(JobKnown("freezing", 4, True))
    if case == "asked":
        led.controller.post(ev.StopRequested(15))
    if case == "no ranks":
        led.here.alive = ()
    led.link.lose()
    assert led.looks == []
    assert led.controller.ending is not None


def test_another_controller_hears_all_and_ranks_meet_there(led):
    led.link.lose()
    led.link.said.clear()
    succeeded(led)
    assert led.link.said.pop() == ToldAgain()
    assert led.hooks.log == [("memory at", "10.0.0.1"), "said again"]
    assert led.hooks.meets_at == "10.0.0.1"
    assert ("moved", 4321, "10.0.0.1") in led.here.log
    assert led.controller.head == 1
    (said,) = led.said
    assert "node 1 (mn1) has its part" in said
    assert said.endswith("the ranks here live on")


@pytest.mark.parametrize("how", ["nobody", "a rank is lost", "a stop"])
def test_if_nobody_decides_the_step_is_saved(led, how):
    led.link.lose()
    if how == "nobody":
        led.looks[0].too_late("no node has taken the part of node 0", True)
    elif how == "a stop":
        led.controller.post(ev.StopRequested(15))
    else:
        led.controller.post(ev.WorkerExited(2, 4, -9))
    assert led.looks[0].is_closed
    assert led.controller.ending == Ended(1, WHY)
    assert bool(led.losses) is (how != "a stop")


def test_one_that_is_lost_before_it_has_replaced_the_ranks_changes_nothing(led):
    """All meet again as if nobody had taken the part of node 0."""
    led.link.lose()
    succeeded(led)
    led.link.is_open = True
    led.link.lose(Loss(LossKind.SILENCE, "is silent"))
    assert len(led.looks) == 1
    assert led.losses[0][0] == CLOSED
    assert led.controller.head == 0


def test_once_the_ranks_are_replaced_another_one_may_follow(led):
    led.hooks.step = 7
    led.link.lose()
    succeeded(led)
    led.link.is_open = True
    led.link.hear(JobKnown("running", 5, True))
    led.hooks.step = 9
    led.link.lose()
    assert [(each.attempt, each.lost) for each in led.looks] == [(4, 0), (5, 1)]


def test_a_step_at_which_the_controller_is_lost_again_may_be_what_kills_it(led):
    led.link.lose()
    succeeded(led)
    led.link.is_open = True
    led.link.hear(JobKnown("running", 5, True))
    led.link.lose()
    assert len(led.looks) == 1
    assert led.controller.head == 1
    assert led.controller.ending is not None
