"""What ranks are told of those that hold the same, should msrun be killed."""

from __future__ import annotations

import pytest

from agent.ranks.parts import Part, seated
from agent.supervisor import job_view
from agent.supervisor.job_view import Holders
from worker_hooks.contract.protocol import Replicated
from worker_hooks.contract.wire import encode

LONE = ((0,), (1,), (2,), (3,))
PARTS = seated(
    4, [Part((0, 1), ("e",)), Part((0, 2), ("w",)), Part((1, 3), ("w",)), Part((2, 3), ("e",))]
)


def test_each_rank_of_a_group_is_told_its_group():
    told = Holders(alike=((0, 2), (1, 3))).told()
    assert told == {rank: Replicated("", [rank % 2, rank % 2 + 2]) for rank in (0, 2, 1, 3)}


def test_a_rank_in_several_parts_is_told_them_in_the_order_of_its_shares():
    told = Holders(alike=LONE, parts=PARTS).told()
    assert told[1] == Replicated("", [1], [[0, 1], [1, 3]], [["e"], ["w"]], 4)
    assert told[2] == Replicated("", [2], [[0, 2], [2, 3]], [["w"], ["e"]], 4)


@pytest.mark.parametrize(
    ("halves", "said"),
    [
        (1, Replicated("")),  # all of them hold the same, whoever is not named
        (2, Replicated("it has 20,001 replicas, more than a message can name")),
    ],
)
def test_a_group_that_no_message_can_name_is_not_named(halves, said):
    ranks = range(20_001 * halves)
    told = Holders(alike=tuple(tuple(ranks[at::halves]) for at in range(halves))).told()
    assert told.keys() == {*ranks}
    assert {repr(each) for each in told.values()} == {repr(said)}


def test_the_largest_group_that_is_named_fits_into_a_message():
    ranks = tuple(range(10**6, 10**6 + 20_000))
    encode(Holders(alike=(ranks,)).told()[ranks[0]])


@pytest.mark.parametrize(("limit", "of"), [("MOST_NAMED", 4), ("MOST_OF_RANK", 1)])
def test_what_would_be_too_much_is_not_told(monkeypatch, limit, of):
    """Each rank is told two names, of one letter each, and four numbers."""
    monkeypatch.setattr(job_view, limit, of * 34)
    assert Holders(alike=LONE, parts=PARTS).told()[0].parts
    monkeypatch.setattr(job_view, limit, of * 34 - 1)
    told = Holders(alike=LONE, parts=PARTS).told()
    assert told == {rank: Replicated("", [rank]) for rank in range(4)}


@pytest.mark.parametrize(
    ("holders", "why"),
    [
        (Holders("not compared"), "not compared"),
        (Holders("cut into parts", alike=LONE), ""),
        (Holders(alike=LONE, apart="/data is not one folder"), "/data is not one folder"),
    ],
)
def test_why_ranks_do_not_save_alone(holders, why):
    assert holders.why_not_alone == why
