"""Sets and mappings of ranks behave as Python's own, and never change."""

from __future__ import annotations

import operator
from enum import Enum
from random import Random

import pytest

from agent.ranks.homes import Homes
from agent.ranks.rank_map import RankMap
from agent.ranks.rank_set import RankSet, bits_of
from agent.ranks.rank_states import RankStates
from agent.ranks.refusals import Refusals


class Light(Enum):
    RED = 1
    GREEN = 2
    OFF = 3


def some(rng, count=200):
    return {rng.randrange(count) for _ in range(rng.randrange(60))}


@pytest.mark.parametrize("seed", range(30))
def test_a_set_of_ranks_is_as_any_set(seed):
    rng = Random(seed)
    one, two = some(rng), some(rng)
    for how in (operator.or_, operator.and_, operator.sub):
        expected = how(one, two)
        for found in (
            how(RankSet(one), RankSet(two)),
            how(RankSet(one), two),
            how(one, RankSet(two)),
        ):
            assert found == expected
            assert isinstance(found, RankSet)
            assert (list(found), len(found), bool(found)) == (
                sorted(expected),
                len(expected),
                bool(expected),
            )
    assert RankSet(one).isdisjoint(two) == one.isdisjoint(two)
    assert (RankSet(one) == RankSet(two)) == (one == two)
    assert (RankSet(one) <= RankSet(two)) == (one <= two)
    assert hash(RankSet(one)) == hash(frozenset(one))
    assert all((rank in RankSet(one)) == (rank in one) for rank in range(-2, 201))
    assert RankSet(one | {16_383}) - {16_383} == one


def test_a_set_of_ranks_is_nothing_else():
    assert RankSet([1]) != {"a"}
    assert RankSet([1]) != [1]
    assert RankSet([1]) != {-1}
    assert "1" not in RankSet([1])
    assert RankSet(range(3, 7)) == {3, 4, 5, 6}
    assert RankSet(range(7, 3)) == RankSet() == frozenset()
    assert bits_of(range(0, 10, 3)) == 0b1001001001
    assert repr(RankSet([2, 1])) == "RankSet([1, 2])"


@pytest.mark.parametrize("seed", range(30))
def test_a_mapping_of_ranks_is_as_any_mapping_and_older_ones_stay(seed):
    rng = Random(seed)
    was = [({}, RankMap())]
    for _ in range(100):
        plain, ours = was[-1]
        rank, value = rng.randrange(300), rng.randrange(5)
        match rng.randrange(4):
            case 0:
                plain, ours = (
                    {each: plain[each] for each in plain if each != rank},
                    ours.without(rank),
                )
            case 1:
                more = {rng.randrange(300): value for _ in range(rng.choice((3, 100)))}
                plain, ours = plain | more, ours.with_all(more)
            case _:
                plain, ours = plain | {rank: value}, ours.set(rank, value)
        was.append((plain, ours))
    for plain, ours in was:
        assert ours == plain
        assert (len(ours), set(ours), ours.ranks) == (len(plain), set(plain), set(plain))
        assert all(ours.get(rank) == plain.get(rank) for rank in range(300))
        assert all((rank in ours) == (rank in plain) for rank in range(300))
        assert (dict(ours.items()), ours.items()) == (plain, plain.items())
        assert list(zip(ours, ours.values(), strict=True)) == list(ours.items())
        some_ranks = some(rng, 300)
        only = {rank: value for rank, value in plain.items() if rank in some_ranks}
        assert ours.only(RankSet(some_ranks)) == only
        assert ours.only(RankSet(range(300))) is ours
    with pytest.raises(KeyError):
        RankMap({1: 1})[2]
    with pytest.raises(KeyError):
        RankMap({1: 1})[200]


def test_what_was_set_first_comes_first():
    assert list(RankMap([(5, "a"), (3, "b")]).set(4, "c").set(5, "d")) == [5, 3, 4]


def test_setting_what_is_there_makes_nothing_new():
    value = object()
    ours = RankMap({1: value})
    assert ours.set(1, value) is ours
    assert ours.without(2) is ours


@pytest.mark.parametrize("seed", range(20))
def test_states_are_as_a_mapping(seed):
    rng = Random(seed)
    plain = {rank: rng.choice([*Light]) for rank in range(100)}
    ours, before = RankStates(plain), dict(plain)
    first = ours
    for _ in range(60):
        rank, state = rng.randrange(100), rng.choice([*Light])
        plain[rank] = state
        ours = ours.set(rank, state)
    many = some(rng, 100)
    plain |= dict.fromkeys(many, Light.OFF)
    ours = ours.with_all(many, Light.OFF)
    assert ours == plain
    assert first == before
    assert dict(ours.items()) == plain
    assert list(ours) == list(range(100))
    for state in Light:
        assert ours.in_state(state) == {rank for rank, each in plain.items() if each is state}
    assert ours.in_state(*Light) == ours.all == set(plain)
    with pytest.raises(KeyError):
        ours[100]


def test_who_can_and_why_others_cannot():
    said = (
        Refusals()
        .noted(RankSet((1,)), "")
        .noted(RankSet((2,)), "it is tired")
        .noted(RankSet((3,)), "")
    )
    assert (said.able, said.reasons, said.ranks) == ({1, 3}, {2: "it is tired"}, {1, 2, 3})
    said = said.noted(RankSet((2,)), "").noted(RankSet((1,)), "so is it")
    assert (said.able, said.reasons, said.ranks) == ({2, 3}, {1: "so is it"}, {1, 2, 3})


def test_ranks_are_split_by_where_they_run_in_one_pass():
    homes = Homes([("a", range(2, 4)), ("b", range(4, 6))])
    assert homes.split((5, 0, 3, 2, 1, 4)) == ((0, 1), {"b": (5, 4), "a": (3, 2)})
    assert homes.split(()) == ((), {})
    assert (homes[4], homes.get(0), 1 in homes) == ("b", None, False)
