"""Who takes the part of a lost node 0 while the ranks of all other nodes live on."""

import pytest

from agent.arrivals.successors import Successors, Takeover, swapped, why_not_awaited
from agent.nodes.line import CLOSED, Loss, LossKind
from agent.nodes.messages import Join, LivingRanks, SurvivedStep
from agent.nodes.roster import Doors
from agent.nodes.run_messages import NodeFacts

LIVING = LivingRanks("job", 1, 4, "", "", 0, (), "program", 8, 0)
NODES = tuple(NodeFacts(rank, f"mn{rank}", f"10.0.0.{rank}", 2, 9, door=77) for rank in range(4))


def doors(gone=(), there=(), silent=()):
    return Doors(frozenset(gone), frozenset(silent), frozenset(there))


def join(rank, **other):
    living = LIVING._replace(node_rank=rank, **other)
    return Join("", f"r{rank}", rank, 2, f"mn{rank}", 9, "1", "", "", "", door=77, living=living)


def why_not(loss=CLOSED, nodes=NODES, own=2, lost=0, *, is_calm=True, is_fixed=True):
    return why_not_awaited(loss, nodes, own, lost, is_calm=is_calm, is_fixed=is_fixed)


def test_ranks_wait_for_another_controller_if_its_death_is_proven():
    assert why_not() == ""
    assert why_not(Loss(LossKind.SILENCE, "is silent")) == "it may be alive"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"is_calm": False}, "an order of it may not have been carried out"),
        ({"is_fixed": False}, "the job may go on with fewer nodes"),
        ({"nodes": (*NODES[:3], NODES[3]._replace(door=0))}, "not every node can be found"),
        ({"nodes": NODES[:2]}, "not every node can be found"),
    ],
)
def test_they_save_their_step_where_it_is_not_as_simple(case, why):
    assert why_not(**case) == why


def test_all_go_to_the_first_that_is_there():
    assert Successors(3, 0, range(4)).doors == {0, 1, 2}
    for own in (2, 3):
        assert Successors(own, 0, range(4)).look(doors({0}, {1, 2})) == 1
    assert Successors(1, 0, range(4)).look(doors({0})) == 1  # it is that one
    assert Successors(3, 0, range(4)).look(doors({0, 1}, {2})) == 2
    assert Successors(3, 0, range(4)).look(doors({0, 1, 2})) == 3


def test_nobody_is_passed_over_that_may_be_there():
    assert Successors(3, 0, range(4)).look(doors({0}, {2})) is None
    assert Successors(3, 0, range(4)).look(doors({0}, {2}, silent={1})) is None


def test_nobody_takes_the_part_of_one_that_may_be_there():
    assert Successors(1, 0, range(4)).look(doors()) is None
    assert Successors(1, 0, range(4)).look(doors(there={0})) is None
    assert Successors(1, 0, range(4)).look(doors(silent={0})) is None


def test_the_part_of_a_later_node_is_taken_by_the_first():
    """Another node had node 0's part, and that one has others' ranks."""
    assert Successors(0, 1, range(4)).look(doors({1})) == 0
    assert Successors(2, 1, range(4)).look(doors({1}, {0})) == 0
    assert Takeover(LIVING, 1, range(4)).missing([]) == {0, 2, 3}


@pytest.fixture
def takeover():
    return Takeover(LIVING, 0, range(4))


def test_it_decides_once_all_others_have_come_and_the_lost_one_is_gone(takeover):
    here = [join(1), join(2)]
    assert takeover.awaited(here) == {0, 3}
    assert not takeover.may_begin(here, doors({0}, {3}))
    here.append(join(3))
    assert not takeover.may_begin(here, doors())  # nobody knows yet
    assert not takeover.may_begin(here, doors(silent={0}))
    assert takeover.may_begin(here, doors({0}))


def test_it_never_will_if_another_node_is_gone_or_the_lost_one_is_there(takeover):
    here = [join(1), join(2)]
    assert not takeover.is_in_vain(here, doors({0}, {3}))
    assert takeover.is_in_vain(here, doors({0, 3}))
    assert takeover.is_in_vain(here, doors(there={0}))


@pytest.mark.parametrize(
    "other",
    [{"attempt": 3}, {"job": "another"}, {"program": "another"}, {"world": 6}],
    ids=["attempt", "job", "program", "world"],
)
def test_it_needs_those_that_know_the_same(takeover, other):
    """As one that was taken for lost, and whose place another node has."""
    assert not takeover.is_member(join(2, **other))
    assert not takeover.may_begin([join(1), join(2, **other), join(3)], doors({0}))


def test_who_has_saved_or_is_the_lost_one_is_none_of_them(takeover):
    saved = join(2)._replace(living=None, survived=SurvivedStep("job", 2, "/c", 9, (), "program"))
    assert not takeover.is_member(saved)
    assert not takeover.is_member(join(0))
    assert not takeover.is_member(join(2)._replace(node_rank=3))


def test_nodes_that_meet_again_count_who_was_lost_as_node_0():
    found = swapped(NODES, 2)
    assert [each.host for each in found] == ["mn2", "mn1", "mn0", "mn3"]
    assert [each.rank for each in found] == [0, 1, 2, 3]
    assert swapped(NODES, 0) == NODES
