"""What ranks are ordered to save of each part that they hold, and which answers count."""

import pytest
from support.dump_desk import Lines

from agent.controller import actions as do
from agent.dump.draft import state_nbytes
from agent.dump.replies import Replies
from agent.ranks.parts import Part, Parts, seated
from worker_hooks.contract import protocol

SHARED = seated(
    4,
    (
        Part((0, 1), ("layer",)),
        Part((0, 2), ("expert",)),
        Part((1, 3), ("expert",)),
        Part((2, 3), ("layer",)),
    ),
)  # the seats of rank 0 are 0 and 4, those of rank 3 are 3 and 7
ORDER = do.SaveRanks(
    1, 9, (0, 4, 1), (5,), do.MEMORY, "", 2, groups=((0, 1), (4,)), parts=SHARED.every
)


@pytest.fixture
def asked():
    lines, heard = Lines(), []
    replies = Replies(lines, heard.append, lambda _: None)
    replies.begin(1)
    replies.ask_digesters(ORDER, SHARED)
    replies.ask_writers(ORDER, SHARED, ("/a", "/b", "/c"))
    return lines, heard, replies


def test_each_part_is_ordered_by_itself(asked):
    told = [
        (rank, each.folder, each.part, each.parts, each.share, each.without)
        for rank, each in asked[0].sent
    ]
    assert told == [
        (1, "", 0, 0, 1, ["expert"]),
        (0, "/a", 0, 2, 0, ["layer"]),
        (1, "/c", 1, 2, 0, ["layer"]),
        (0, "/b", 0, 1, 1, ["expert"]),
    ]
    assert {(each.step, each.round, each.is_quick) for _, each in asked[0].sent} == {(9, 2, True)}


def test_an_answer_is_to_one_of_them(asked):
    lines, heard, replies = asked
    wrote = protocol.Written(0, 0, 1, "", 4, "", "d", 2, 1)
    replies.hear(wrote)
    assert heard == [wrote]
    assert replies.written == {(0, 1): wrote}
    replies.hear(wrote)  # twice
    assert [rank for rank, _ in lines.dropped] == [0]
    replies.hear(protocol.Digested(1, 0, 1, "d", 2, 1))
    assert len(heard) == 2


def test_the_parts_of_a_rank_make_up_its_state():
    sizes = dict.fromkeys(range(4), (100, 0))
    every = do.SaveRanks(1, 9, (0, 4, 5, 7), (), 0, "", groups=((0,), (4,), (5,), (7,)))
    assert state_nbytes(every, SHARED, sizes) == 200
    cut = do.SaveRanks(1, 9, (0, 1), (), 0, "", groups=((0,), (1,)))
    assert state_nbytes(cut, Parts(), sizes) == 200
    assert state_nbytes(do.SaveRanks(1, 9, (0, 1), (), 0, ""), Parts(), sizes) == 100
