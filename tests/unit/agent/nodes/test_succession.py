"""Nodes that have lost node 0 meet at another one: who is enough, and who else gets a place."""

import time
from itertools import chain, combinations

import pytest
from support.meeting_nodes import LONG_S, node

from agent.nodes import gather as gathering
from agent.nodes.gather import MissingNodesError, Succession
from agent.nodes.join import NobodyThereError
from agent.nodes.messages import SurvivedStep
from agent.nodes.roster import Doors, NodeZeroBackError, Survivors
from agent.seat.records import HeldSeat
from agent.seat.rights import SuccessorRight
from agent.spec.job_spec import NotStartedError
from agent.spec.spent_budget import SpentBudget


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Doors are knocked at all the time."""
    monkeypatch.setattr(gathering, "KNOCK_S", 0.02)


class Knocks:
    """What the test says that came of knocking."""

    def __init__(self, doors=None):
        self.doors = doors or Doors(gone=frozenset({0}))
        self.is_back = False
        self.awaited = None

    def __call__(self, awaited):
        self.awaited = awaited
        if self.is_back:
            raise NodeZeroBackError
        return self.doors


def survived(rank, step=5, job="lost", **more):
    path, lineage = f"/ckpt/step_{step}", ("lost", "before")
    return SurvivedStep(job, rank, path, step, lineage, "train.py", **more)


def one(rank, spent=None, **more):
    found = node(f"mn{rank}", survived=survived(rank, **more))
    return found._replace(spent=spent or found.spent)


def lead(job, knocks, nodes=3, **more):
    """Node 1 takes the part of node 0."""
    succession = Succession(Survivors(nodes, "lost"), knocks)
    own = one(1)._replace(node_rank=0)
    return job.gather(nnodes=nodes, own=own, succession=succession, **more)


def hosts(controller):
    return [each.host for each in controller.result(LONG_S).roster.nodes]


def test_all_that_live_and_a_new_node_are_enough(job):
    knocks, told = Knocks(), []
    controller = lead(
        job, knocks, settings=lambda _, saved, _spent: told.append(saved) or {"port": 1}
    )
    others = [job.join(one(2, step=6)), job.join(node("mn7", is_spare=True))]
    assert hosts(controller)[0] == "mn1"
    assert sorted(hosts(controller)) == ["mn1", "mn2", "mn7"]
    assert [each.result(LONG_S).settings for each in others] == [{"port": 1}] * 2
    assert told == [survived(2, step=6)]  # the newest that one of them knows


def test_what_the_job_has_used_up_is_what_the_node_says_that_knows_most(job):
    """Node 0 may have been lost while it told them."""
    told = []
    own = one(1, spent=SpentBudget(0, 2, (5.0, 5.0)))._replace(node_rank=0)
    succession = Succession(Survivors(3, "lost"), Knocks())
    controller = job.gather(
        nnodes=3,
        own=own,
        succession=succession,
        settings=lambda _, _saved, spent: told.append(spent) or {"port": 1},
    )
    began_s = time.monotonic()
    more = SpentBudget(1, 3, (began_s - 9.0, began_s - 9.0, began_s - 2.0))
    others = [job.join(one(2, spent=more)), job.join(node("mn7", is_spare=True))]
    assert len(hosts(controller)) == len(others) + 1
    (spent,) = told
    assert (spent.restarts, spent.replaced) == (1, 3)
    assert spent.replaced_at_s == pytest.approx(more.replaced_at_s, abs=time.monotonic() - began_s)


@pytest.mark.parametrize("more", [{"is_spare": True}, {}], ids=str)
def test_who_was_not_in_the_job_waits_for_those_that_may_still_come(job, more):
    knocks = Knocks()
    controller = lead(job, knocks)
    early = job.join(node("mn7", **more), is_once=True)
    assert isinstance(early.exception(LONG_S), NobodyThereError)
    assert knocks.awaited == {0, 2}
    knocks.doors = Doors(gone=frozenset({0, 2}))  # node 2 is lost as well
    others = [job.join(node(host, **more)) for host in ("mn7", "mn8")]
    assert sorted(hosts(controller)) == ["mn1", "mn7", "mn8"]
    for other in others:
        other.result(LONG_S)


def test_a_node_that_is_silent_may_have_gone_on(job):
    """Two of three may begin without node 0; of two or of four that are silent, one may not."""
    controller = lead(job, Knocks(Doors(silent=frozenset({0}))))
    others = [job.join(one(2)), job.join(node("mn7", is_spare=True))]
    assert sorted(hosts(controller)) == ["mn1", "mn2", "mn7"]
    for other in others:
        other.result(LONG_S)


def test_half_of_the_nodes_do_not_begin(job):
    controller = lead(job, Knocks(Doors(silent=frozenset({0}))), nodes=2, timeout_s=1.0)
    early = job.join(node("mn7", is_spare=True), is_once=True)
    assert isinstance(early.exception(LONG_S), NobodyThereError)
    error = controller.exception(LONG_S)
    assert isinstance(error, MissingNodesError)
    assert str(error).endswith(
        "; node 0 has not come and may be alive: to begin without takes more than half of the nodes"
    )


def test_what_is_wrong_with_the_checkpoint_is_told_to_all(job):
    def settings(_roster, _saved, _spent):
        raise NotStartedError("the checkpoint /c is damaged: file 1")

    controller = lead(job, Knocks(), nodes=2, settings=settings)
    other = job.join(node("mn7", is_spare=True))
    assert isinstance(controller.exception(LONG_S), NotStartedError)
    assert "mn1: the checkpoint /c is damaged: file 1" in str(other.exception(LONG_S).why)


def test_survivors_of_another_job_do_not_count(job):
    controller = lead(job, Knocks(), nodes=3, timeout_s=1.0)
    stray = job.join(one(2, job="another"), is_once=True)
    controller.exception(LONG_S)
    assert isinstance(stray.exception(LONG_S), NobodyThereError)


def test_who_was_taken_for_lost_before_does_not_count(job):
    """Another node has its place since, and may be with others."""
    knocks = Knocks(Doors(silent=frozenset({0, 3, 4})))
    newest = survived(1)._replace(attempt=1)
    own = one(1)._replace(node_rank=0, survived=newest)
    succession = Succession(Survivors(5, "lost"), knocks)
    controller = job.gather(nnodes=3, own=own, succession=succession, timeout_s=1.0)
    for rank in (2, 3):
        job.join(one(rank), is_once=True)
    assert isinstance(controller.exception(LONG_S), MissingNodesError)


def test_who_is_in_the_place_of_a_silent_node_does_not_count_with_node_0_lost(job):
    """That one may live, and be with those that have not come."""
    knocks = Knocks()
    controller = lead(job, knocks, nodes=4, timeout_s=1.0)
    others = [job.join(one(2, is_haunted=True)), job.join(one(3, is_haunted=True))]
    with pytest.raises(MissingNodesError, match="more than half of the nodes"):
        controller.result(LONG_S)
    for other in others:
        other.exception(LONG_S)


@pytest.mark.parametrize("is_held", [False, True])
def test_half_of_the_nodes_begin_if_a_store_says_so(is_held):
    right = SuccessorRight("1-a")
    survivors = Survivors(4, "lost", right)
    assert right.wish(survivors.standing({1, 2}, Doors()), 0.0) is not None
    if is_held:
        right.took(HeldSeat("2-b", "7"), 0.1)
    assert survivors.may_begin({1, 2}, Doors()) is is_held
    assert bool(survivors.why_not({1, 2}, Doors())) is not is_held
    survivors.haunted = {2}
    assert not survivors.may_begin({1, 2}, Doors())


@pytest.mark.parametrize("others", [(1, 2), (1, 2, 3)])
def test_a_node_0_that_is_started_again_begins_a_smaller_job_with_most_of_the_others(job, others):
    told = {rank: survived(rank)._replace(nodes=5) for rank in others}
    own = node("mn0", program="train.py")
    controller = job.gather(nnodes=5, own=own, least=2, last_call_s=0.2, timeout_s=2.0)
    joined = [job.join(node(f"mn{rank}", survived=each)) for rank, each in told.items()]
    if len(others) == 3:
        assert len(hosts(controller)) == 4
        for each in joined:
            each.result(LONG_S)
        return
    error = controller.exception(LONG_S)
    assert "2 of the 4 other nodes have come that were in the job" in str(error)
    for each in joined:
        each.exception(LONG_S)


def test_enough_of_them_may_begin_a_smaller_job(job):
    controller = lead(job, Knocks(), least=2, last_call_s=0.2)
    other = job.join(one(2))
    assert sorted(hosts(controller)) == ["mn1", "mn2"]
    other.result(LONG_S)


def test_who_has_joined_dials_again_when_node_0_is_back(job):
    knocks = Knocks()
    controller = lead(job, knocks)
    other = job.join(one(2), is_once=True)
    while knocks.awaited != {0}:
        pass
    knocks.is_back = True
    assert isinstance(controller.exception(LONG_S), NodeZeroBackError)
    assert "closed the connection" in str(other.exception(LONG_S))


def test_a_node_0_that_is_started_again_hears_where_the_job_goes_on(job):
    told = []
    controller = job.gather(
        nnodes=3,
        own=node("mn0", program="train.py"),
        settings=lambda _, saved, _spent: told.append(saved) or {"port": 1},
    )
    others = [job.join(one(rank, step=4 + rank)) for rank in (1, 2)]
    assert len(hosts(controller)) == 3
    for other in others:
        other.result(LONG_S)
    assert told == [survived(2, step=6)]


def test_who_goes_on_with_another_script_is_refused_by_a_new_job(job):
    controller = job.gather(nnodes=2, own=node("mn0", program="other.py"), timeout_s=LONG_S)
    error = job.join(one(1)).exception(LONG_S)
    assert "goes on with a job that runs another script or has other arguments" in error.why
    other = job.join(node("mn2"))
    assert hosts(controller) == ["mn0", "mn2"]
    other.result(LONG_S)


def subsets(whole):
    return chain.from_iterable(combinations(whole, count) for count in range(len(whole) + 1))


@pytest.mark.parametrize("count", range(2, 7))
def test_no_two_parts_of_a_job_go_on(count):
    """However the network falls apart, and whoever of them is gone: at most one part begins."""
    survivors, nodes = Survivors(count, ""), frozenset(range(count))
    for dead in map(frozenset, subsets(nodes)):
        for here in map(set, subsets(nodes - dead)):
            there = nodes - dead - here
            doors = [Doors(gone=dead, silent=frozenset(part)) for part in (there, here)]
            both = survivors.may_begin(here, doors[0]), survivors.may_begin(set(there), doors[1])
            assert not all(both), (dead, here)
            # node 0 gives up where a part without it may begin, see AllNodes
            assert any(both) or 2 * len(here) <= len(nodes - dead)


def test_the_places_of_those_that_may_come_are_kept():
    survivors = Survivors(4, "")
    assert survivors.may_begin({1, 2, 3}, Doors())
    assert not survivors.may_begin({1, 2}, Doors())
    assert survivors.may_begin({1, 2}, Doors(gone=frozenset({0})))
    assert not survivors.take_others({1, 2}, Doors(gone=frozenset({0})))
    assert survivors.take_others({1, 2}, Doors(gone=frozenset({0}), silent=frozenset({3})))
    assert not survivors.take_others({1}, Doors(gone=frozenset({0}), silent=frozenset({2, 3})))
    # one that has come is not gone, whatever a knock at its door has said before
    assert not survivors.may_begin({1}, Doors(gone=frozenset({1})))
    assert survivors.awaited({1, 2}) == {0, 3}
