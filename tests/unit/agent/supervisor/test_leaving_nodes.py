"""A node of a job of --nnodes=MIN:MAX is asked to end, as node 0 sees it."""

from dataclasses import replace
from signal import SIGKILL, SIGTERM
from types import SimpleNamespace

import pytest
from support.node_cluster import wish

from agent.arrivals.resize import Resize
from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.states import JobState
from agent.nodes.messages import Spare
from agent.nodes.run_messages import Ended
from agent.supervisor.job_view import Holders, JobView

LEAVES = ev.StopRequested(SIGTERM, node=1, leaves=True)
CALM = JobView(JobState.RUNNING, 1, has_hooks=True)
STEP = "/d/step_5"
LEFT = f"this node has left: the job goes on with 2 nodes, from {STEP}"


@pytest.fixture
def job(waiting):
    """On three nodes, and two are enough."""
    waiting.size(Resize(2, 4, 3))
    for node in waiting.others:
        node.facts = node.facts._replace(door=7)
    waiting.all._doorkeeper.facts[1:] = [node.facts for node in waiting.others]
    of_ranks = {0: range(2), 1: range(2, 5), 2: range(5, 6)}
    waiting.all.met.roster.ranks = of_ranks.__getitem__
    be(waiting, CALM)
    return waiting


def be(job, view, holders=None):
    job.controller.view = view
    job.all.decided(view, holders or Holders())


def ended(**about):
    known = {"exit_code": 0, "reason": "all left", "state": JobState.STOPPED, "saved": STEP}
    known |= {"lost": "", "is_to_end": False, "asking": frozenset()}
    return SimpleNamespace(**(known | about))


def test_all_ranks_save_their_step_and_only_that_node_ends(job):
    job.hear(LEAVES)
    assert job.events == [replace(LEAVES, why="node 1 (b) leaves: the job goes on with 2 nodes")]
    job.controller.ending = ended()
    assert (job.all.goes_on_with, job.all.farewell) == (2, "")
    job.all.finish()
    assert job.links[0].said[-1] == Ended(0, LEFT, "stopped", has_left=True)
    assert job.links[1].said[-1] == Ended(0, "all left", "stopped", goes_on=True)


def test_node_0_leaves_and_is_found_no_more_as_the_others_hear_of_it(job):
    job.all.post(replace(LEAVES, node=0))
    assert job.events[0].leaves
    assert job.events[0].why == "node 0 (a) leaves: the job goes on with 2 nodes"
    job.controller.ending = ended()
    assert (job.all.goes_on_with, job.all.farewell) == (2, LEFT)
    job.all.finish()
    assert job.door.fileno() == -1
    for link in job.links:
        assert link.said[-1] == Ended(0, "all left", "stopped", goes_on=True, without_first=2)


def test_node_0_stays_where_the_others_would_not_find_each_other(job):
    job.all._doorkeeper.facts[2] = job.all._doorkeeper.facts[2]._replace(door=0)
    job.all.post(replace(LEAVES, node=0))
    assert not job.events[0].leaves
    assert "--node-wait=0" in job.said[-1]
    job.hear(LEAVES)
    assert job.events[1].leaves  # which does not matter of another one


@pytest.mark.parametrize(
    ("view", "holders", "why"),
    [
        (CALM._replace(has_hooks=False), Holders(), "no rank can save its state yet"),
        (CALM, Holders(apart="/d is not one folder"), "/d is not one folder"),
    ],
)
def test_where_the_step_cannot_be_saved_for_others_the_whole_job_stops(job, view, holders, why):
    be(job, view, holders)
    job.hear(LEAVES)
    assert job.events == [replace(LEAVES, leaves=False)]
    assert job.said[-1] == f"the job does not go on without node 1 (b), but stops: {why}"


def test_a_job_that_resumes_has_a_step_from_its_start_on(job):
    be(job, CALM._replace(state=JobState.STARTING, has_hooks=False))
    job.all._size._resumes = True
    job.hear(LEAVES)
    assert job.events[0].leaves


def test_a_node_that_is_lost_already_is_not_left(job, monkeypatch):
    monkeypatch.setattr(job.all._door, "seat", lambda: None)
    job.others[1].line.close()
    job.hear(LEAVES)
    assert job.events == [replace(LEAVES, leaves=False)]
    assert "1 node would be left, and it needs 2 at least" in job.said[-1]


def test_a_node_that_is_lost_meanwhile_is_not_counted_on(job, monkeypatch):
    monkeypatch.setattr(job.all._door, "seat", lambda: None)
    job.size(Resize(1, 4, 3))
    job.hear(LEAVES)
    job.others[1].line.close()
    job.all.post(replace(LEAVES, node=0))
    assert [event.leaves for event in job.events] == [True, False]
    assert "no other node would be left" in job.said[-1]


def test_a_node_that_waits_takes_the_place_of_one_that_leaves(job):
    """The job is full, so it is not taken in before; a spare node waits on."""
    job.size(Resize(2, 3, 3))
    job.all._door._spares = {"d": wish(), "e": wish(is_spare=True)}
    job.hear(LEAVES)
    assert job.events[0].why == "node 1 (b) leaves: the job goes on with 3 nodes"
    job.controller.ending = ended()
    assert job.all.goes_on_with == 3


def test_who_comes_as_the_run_ends_for_another_size_waits_for_the_next_one(job, monkeypatch):
    """In the place of a node that is to leave it would hear that it has left."""
    monkeypatch.setattr(job.all._door, "seat", lambda: None)
    job.hear(LEAVES)
    job.others[0].line.close()
    job.all._places.lose(1, 0.0, is_silent=False)
    comer = wish(3, "d")
    assert isinstance(job.all._doorkeeper.judge(comer, "10.0.0.4"), Spare)
    job.all._door._spares = {"d": comer}
    monkeypatch.setattr(job.all._door, "close", lambda _: job.all._door._spares.clear())
    job.controller.ending = ended()
    job.all.finish()
    assert job.all.goes_on_with == 3


def test_who_is_lost_as_others_leave_may_go_on_elsewhere(job, monkeypatch):
    """So no more than those that leave are left out of whom this node has to have half."""
    monkeypatch.setattr(job.all._door, "seat", lambda: None)
    job.size(Resize(1, 4, 3))
    job.hear(LEAVES)
    job.others[1].line.close()
    job.controller.ending = ended()
    job.all.finish()
    assert (job.all.goes_on_with, job.all.staying) == (1, 2)


def test_a_node_does_not_leave_a_job_whose_other_nodes_are_lost(job, monkeypatch):
    monkeypatch.setattr(job.all._door, "seat", lambda: None)
    job.size(Resize(1, 4, 3))
    job.all.post(replace(LEAVES, node=0))
    assert job.events[0].leaves
    for other in job.others:
        other.line.close()
    job.controller.ending = ended()
    job.all.finish()
    assert (job.all.goes_on_with, job.all.farewell) == (0, "")
    why = "no other node is left"
    assert job.said[-1] == f"the job does not go on without node 0, but stops: {why}"


def test_while_others_save_a_second_signal_ends_the_ranks_of_that_node_alone(job):
    job.hear(LEAVES)
    be(job, CALM._replace(state=JobState.HOLDING))
    job.hear(LEAVES)
    assert len(job.events) == 2  # now all save at once
    be(job, CALM._replace(state=JobState.DUMPING))
    job.hear(LEAVES)
    assert len(job.events) == 2
    assert job.links[0].orders()[-1] == do.SignalRanks(
        (2, 3, 4), SIGKILL, "its node leaves at once"
    )


def test_who_wants_the_whole_job_to_end_has_the_last_word(job):
    job.hear(LEAVES)
    job.controller.is_to_end = True
    job.hear(replace(LEAVES, leaves=False))
    job.hear(LEAVES)
    assert [event.leaves for event in job.events] == [True, False, False]
    job.controller.ending = ended(is_to_end=True, reason="msrun received SIGINT")
    said = len(job.said)
    job.all.finish()
    assert job.said[said:] == []  # that is clear
    for link in job.links:
        assert link.said[-1] == Ended(0, "msrun received SIGINT", "stopped")


@pytest.mark.parametrize(("rank", "nodes"), [(3, 2), (5, 0), (0, 0)])
def test_a_rank_that_got_the_signal_as_well_asks_for_no_more_than_its_node(job, rank, nodes):
    job.hear(LEAVES)
    job.controller.ending = ended(asking=frozenset({rank}))
    assert job.all.goes_on_with == nodes


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"lost": "no rank holds step 6"}, "no rank holds step 6"),
        ({"saved": None}, "no step is saved"),
        ({"asking": frozenset({3, 5})}, "rank 5 has asked for its end"),
        ({"asking": frozenset({0, 1, 5})}, "ranks 0-1,5 have asked for its end"),
    ],
)
def test_why_a_node_has_not_left_after_all_is_said(job, about, why):
    job.hear(LEAVES)
    job.controller.ending = ended(**about)
    job.all.finish()
    assert job.said[-1] == f"the job does not go on without node 1, but stops: {why}"
    assert not job.links[0].said[-1].has_left
