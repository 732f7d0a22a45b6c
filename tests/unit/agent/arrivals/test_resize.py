"""A job of --nnodes=MIN:MAX goes on with more nodes, or with fewer."""

import pytest

from agent.arrivals.resize import Resize


def test_nodes_that_come_are_taken_in_as_long_as_there_is_room():
    resize = Resize(2, 4, 2)
    assert resize.has_room
    assert resize.grow([]) == ""
    assert resize.grow(["c"]) == "c has come: the job goes on with 3 nodes"
    assert (resize.expected, resize.request) == (3, "c has come: the job goes on with 3 nodes")
    assert resize.grow(["c", "d"]) == ""  # it ends already


def test_no_more_are_taken_in_than_there_is_room_for():
    resize = Resize(1, 4, 1)
    assert resize.grow(["b", "c", "d", "e"]) == "b, c and d have come: the job goes on with 4 nodes"
    assert resize.expected == 4


@pytest.mark.parametrize(("least", "nodes"), [(0, 2), (2, 4)])
def test_a_job_without_room_does_not_grow(least, nodes):
    resize = Resize(least, 4, nodes)
    assert not resize.has_room
    assert resize.grow(["e"]) == ""
    assert resize.expected == 0


def test_it_goes_on_with_fewer_down_to_the_least():
    assert Resize(2, 4, 3).shrink(2) == "the job goes on with 2 nodes"
    assert Resize(1, 4, 2).shrink(1) == "the job goes on with 1 node"
    assert Resize(2, 4, 2).shrink(1) == ""
    apart = Resize(2, 4, 3)
    assert (
        apart.shrink(2, "/d is not one folder") == "the job keeps its size, as /d is not one folder"
    )
    assert (apart.expected, Resize(0, 4, 4).shrink(3, "why")) == (0, "")
    assert Resize(0, 4, 4).shrink(3) == ""


def test_a_node_that_leaves_is_done_without_down_to_the_least():
    resize = Resize(2, 4, 4)
    assert resize.leave(3, "node 3 (d)", stay=3) == ""
    assert resize.request == "node 3 (d) leaves: the job goes on with 3 nodes"
    assert resize.leave(3, "node 3 (d)", stay=3) == ""  # a second signal
    assert (resize.expected, resize.leaving) == (3, {3})
    assert resize.leave(0, "node 0 (a)", stay=2) == ""  # one more, meanwhile
    assert resize.request == "node 0 (a) leaves as well: the job goes on with 2 nodes"
    assert resize.leave(1, "node 1 (b)", stay=1) == (
        "1 node would be left, and it needs 2 at least"
    )
    assert (resize.expected, resize.leaving) == (2, {0, 3})


def test_the_last_node_does_not_leave():
    assert Resize(1, 4, 1).leave(0, "node 0 (a)", stay=0) == "no other node would be left"
    # who waits has no step to go on from
    alone = Resize(1, 4, 1).leave(0, "node 0 (a)", stay=0, comers=1)
    assert alone == "no other node would be left"


def test_a_job_of_a_fixed_number_of_nodes_keeps_all():
    assert Resize(0, 4, 4).leave(3, "node 3 (d)", stay=3) == "it has a fixed number of nodes"


def test_nodes_that_wait_are_taken_in_as_one_leaves():
    """They dial again at once: else the first of them would have the place of one that stays."""
    full = Resize(2, 3, 3)
    assert full.leave(2, "node 2 (c)", stay=2, comers=1) == ""
    assert full.request == "node 2 (c) leaves: the job goes on with 3 nodes"
    assert full.leave(1, "node 1 (b)", stay=1, comers=2) == ""
    assert full.expected == 3
    least = Resize(3, 3, 3)
    assert least.leave(2, "node 2 (c)", stay=2) != ""
    assert least.leave(2, "node 2 (c)", stay=2, comers=4) == ""
    assert least.expected == 3


def test_a_node_may_leave_as_others_come_or_are_done_without():
    grown = Resize(2, 4, 2)
    grown.grow(["c"])
    assert grown.leave(1, "node 1 (b)", stay=1, comers=1) == ""
    assert grown.request == "node 1 (b) leaves: the job goes on with 2 nodes"
    assert grown.expected == 2
    assert Resize(1, 4, 2).leave(1, "node 1 (b)", stay=1) == ""
    shrunk = Resize(1, 4, 3)
    shrunk.shrink(2)
    assert shrunk.leave(1, "node 1 (b)", stay=1) == ""
    assert shrunk.expected == 1
    assert shrunk.shrink(2) == ""  # of these one leaves
    assert shrunk.expected == 1
    assert shrunk.grow(["e"]) == ""  # it meets the others once they have met again


ENDED = {"is_done": False, "is_saved": True, "is_to_end": False}


@pytest.mark.parametrize(
    ("changed", "goes_on"),
    [
        ({}, True),
        ({"is_saved": False}, False),
        ({"is_done": True}, False),  # as the node came
        ({"is_to_end": True}, False),
    ],
)
def test_it_goes_on_unless_somebody_stops_it_or_it_is_not_saved(changed, goes_on):
    resize = Resize(2, 4, 2)
    resize.grow(["c"])
    assert resize.goes_on(**{**ENDED, **changed}) is goes_on


def test_a_job_of_its_size_ends_as_it_does():
    assert not Resize(2, 4, 2).goes_on(**ENDED)


def test_a_lost_node_was_nobodys_request():
    resize = Resize(2, 4, 3)
    resize.shrink(2)
    assert resize.goes_on(**ENDED)
