"""What ranks of a node say alike travels as one message, and each rank's words keep their order."""

import json
import random

import pytest

from agent.nodes.alike import MOST_KINDS, MOST_NEWEST, Merger, Once, said_by
from agent.nodes.messages import pack, unpack
from agent.nodes.run_messages import (
    FromRank,
    FromRanks,
    PageSeen,
    ToRank,
    ToRanks,
    Wake,
    pack_said,
)
from agent.nodes.vocabulary import CodecError
from worker_hooks.contract import protocol

GO = pack_said(protocol.GoOn(1))


def frozen(rank, step=7):
    return FromRank(pack_said(protocol.Frozen(rank, 0, 1, step, is_whole=True)))


def heard(message):
    """What is told of each rank."""
    if isinstance(message, FromRanks):
        return [FromRank(pack_said(said)) for said in said_by(message, range(90, 92))]
    return [ToRank(rank, message.message) for rank in message.ranks]


def merged(*messages, ranks=()):
    merger = Merger(ranks)
    assert all(merger.add(each) for each in messages)
    found = [unpack(pack(each)) for each in merger.take()]
    assert not merger
    return found


def test_what_all_say_alike_is_one_message_that_names_their_ranks():
    (one,) = merged(*map(frozen, range(8)))
    assert (one.ranks, pack(one)["ranks"]) == (tuple(range(8)), "0-7")
    assert heard(one) == [frozen(rank) for rank in range(8)]
    (order,) = merged(*(ToRank(rank, GO) for rank in range(8)))
    assert order == ToRanks(tuple(range(8)), GO)


def test_what_all_of_a_node_say_alike_names_none_so_other_nodes_say_the_same_bytes():
    (one,), (other,) = (
        merged(*map(frozen, ranks), ranks=ranks) for ranks in (range(90, 92), range(92, 94))
    )
    assert one == other
    assert heard(one) == [frozen(90), frozen(91)]
    (part,) = merged(frozen(90), ranks=range(90, 92))
    assert heard(part) == [frozen(90)]


def test_what_ranks_of_a_lost_node_have_said_names_them_though_they_are_as_many():
    (one,) = merged(frozen(0), frozen(1), ranks=range(90, 92))
    assert heard(one) == [frozen(0), frozen(1)]


def test_exceptions_are_messages_of_their_own():
    said = merged(frozen(0), frozen(1, step=6), frozen(2))
    steps = [(one.ranks, json.loads(one.message)["step"]) for one in said]
    assert steps == [((0, 2), 7), ((1,), 6)]


def test_what_several_nodes_say_alike_is_the_same_text():
    (one,), (other,) = merged(frozen(3), frozen(5)), merged(frozen(8))
    assert one.message == other.message
    assert [said.rank for said in (*said_by(one, ()), *said_by(other, ()))] == [3, 5, 8]


NOBODYS = '{"kind": "GoOn", "attempt": 1}'  # msrun says it


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"kind": "Frozen"}', NOBODYS, "[" * 100_000], ids=repr
)
def test_a_text_that_no_rank_says_is_refused(text):
    with pytest.raises(CodecError):
        list(said_by(FromRanks((0,), text), ()))


def test_what_goes_into_the_other_direction_is_another_message():
    kinds = [type(each) for each in merged(frozen(0), ToRank(0, GO), ToRank(1, GO))]
    assert kinds == [FromRanks, ToRanks]


@pytest.mark.parametrize(
    "message",
    [Wake(3), PageSeen.of(3, 0, b"page"), FromRank({"rank": None})],
    ids=str,
)
def test_the_rest_is_not_merged(message):
    assert not Merger().add(message)


def test_what_waits_is_bounded():
    merger = Merger()
    added = [merger.add(frozen(0, step)) for step in range(MOST_KINDS + 1)]
    assert added == [True] * MOST_KINDS + [False]


@pytest.mark.parametrize("seed", range(200))
def test_each_rank_is_heard_in_order(seed):
    dice = random.Random(seed)
    said = [frozen(dice.randrange(3), dice.randrange(3)) for _ in range(dice.randrange(1, 20))]
    found = [each for one in merged(*said) for each in heard(one)]

    def of(rank, messages):
        return [each for each in messages if each.message["rank"] == rank]

    assert [of(rank, found) for rank in range(3)] == [of(rank, said) for rank in range(3)]


def test_what_goes_to_all_in_turn_is_made_once():
    made = []
    once = Once(lambda thing: made.append(thing) or len(made))
    things = [[at] for at in range(MOST_NEWEST)]  # equal ones are others
    for _ in range(5):
        assert [once(thing) for thing in things] == [1, 2, 3]
    assert once([0]) == 4
    assert once(things[0]) == 5  # the oldest was forgotten
