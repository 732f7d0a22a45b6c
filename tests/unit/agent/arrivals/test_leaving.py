"""What becomes of the request that one node ends: it leaves, or the whole job stops."""

from dataclasses import replace
from signal import SIGTERM

import pytest

from agent.arrivals.leaving import Asked, Departures
from agent.arrivals.resize import Resize
from agent.controller import events as ev

LEAVES = ev.StopRequested(SIGTERM, grace_s=5.0, node=2, leaves=True)
CALM = Asked("node 2 (c)", stay=2)


@pytest.fixture
def said():
    return []


def leaving(said, least=2):
    return Departures(Resize(least, 4, 3), said.append)


def test_it_leaves_and_the_ranks_save_their_step_for_it(said):
    why = "node 2 (c) leaves: the job goes on with 2 nodes"
    assert leaving(said).judged(LEAVES, CALM) == replace(LEAVES, why=why)
    assert said == []  # the decision says it


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (CALM._replace(why_not="no rank can save its state"), "no rank can save its state"),
        (
            CALM._replace(stay=1),
            "1 node would be left, and it needs 2 at least",
        ),
    ],
)
def test_where_it_cannot_the_whole_job_stops_and_says_why(said, asked, why):
    one = leaving(said)
    assert one.judged(LEAVES, asked) == replace(LEAVES, leaves=False)
    assert said == [f"the job does not go on without node 2 (c), but stops: {why}"]
    assert one.judged(LEAVES, asked) == replace(LEAVES, leaves=False)
    assert len(said) == 1


def test_if_the_job_is_to_end_a_node_that_leaves_asks_for_the_same(said):
    asked = CALM._replace(is_to_end=True)
    assert leaving(said).judged(LEAVES, asked) == replace(LEAVES, leaves=False)
    assert said == []


def test_a_second_signal_saves_at_once_and_ends_only_ranks_of_that_node_while_others_save(said):
    one = leaving(said)
    one.judged(LEAVES, CALM)
    after = one.judged(LEAVES, CALM._replace(is_holding=True))  # what is whole is saved
    assert after == replace(LEAVES, why="node 2 (c) leaves at once")
    assert one.judged(LEAVES, CALM) is None
    assert said == ["node 2 (c) leaves at once: its ranks are killed, the others go on"]
    assert one.judged(LEAVES, CALM) is None
    assert len(said) == 1


def test_a_second_node_that_leaves_is_no_second_signal(said):
    one = leaving(said, least=1)
    one.judged(LEAVES, CALM)
    after = one.judged(replace(LEAVES, node=1), CALM._replace(name="node 1 (b)", stay=1))
    assert after.leaves
    assert after.why == "node 1 (b) leaves as well: the job goes on with 1 node"


def test_a_second_node_that_cannot_leave_stops_the_job(said):
    one = leaving(said)
    one.judged(LEAVES, CALM)
    after = one.judged(replace(LEAVES, node=1), CALM._replace(name="node 1 (b)", stay=1))
    assert not after.leaves
    # from now on a signal means what it does to any job
    assert one.judged(LEAVES, CALM._replace(is_to_end=True)) == replace(LEAVES, leaves=False)
