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


ALONE = {"is_done": False, "is_saved": True, "asked": "", "is_stopped_by_signal": False}
OURS = {"is_done": False, "is_saved": True, "asked": "c has come: the job goes on with 3 nodes"}


@pytest.mark.parametrize(
    ("changed", "goes_on"),
    [
        ({}, True),
        ({"is_saved": False}, False),
        ({"is_done": True}, False),  # as the node came
        ({"asked": "msrun received SIGTERM"}, False),  # before the node came
        ({"is_stopped_by_signal": True}, False),
    ],
)
def test_it_goes_on_unless_somebody_stops_it_or_it_is_not_saved(changed, goes_on):
    resize = Resize(2, 4, 2)
    resize.grow(["c"])
    told = {**OURS, "is_stopped_by_signal": False, **changed}
    assert resize.goes_on(**told) is goes_on


def test_a_job_of_its_size_ends_as_it_does():
    assert not Resize(2, 4, 2).goes_on(**ALONE)


def test_a_lost_node_was_nobodys_request():
    resize = Resize(2, 4, 3)
    resize.shrink(2)
    assert resize.goes_on(**ALONE)
