"""Which ranks hold which part of a state, from how each tensor divides them."""

import itertools
import time
from random import Random

import pytest

from agent.ranks.parts import MOST_KINDS, Part, Parts, parts_of

ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))  # of a mesh of 2 x 2
LONE = ((0,), (1,), (2,), (3,))


def refined(count, cuts):
    """The ranks that hold the same of everything."""
    key = {rank: [next(b for b in each if rank in b) for each in cuts] for rank in range(count)}
    found = {}
    for rank in range(count):
        found.setdefault(str(key[rank]), []).append(rank)
    return tuple(map(tuple, found.values()))


def test_ranks_that_share_one_tensor_and_all_others_are_a_part():
    found = parts_of(4, COLUMNS, {"w": COLUMNS, "v": COLUMNS})
    assert found.every == (Part((0, 2)), Part((1, 3)))
    assert found.seats == COLUMNS
    assert not found.are_shared
    assert (found.of_rank(3), found.rank_of(3), found.owner_of(3)) == ((3,), 3, (3, 0))


def test_a_tensor_that_more_ranks_hold_is_in_each_of_their_parts():
    shared = ((0, 1, 4, 5), (2, 3, 6, 7))  # the bias of a layer whose weights are cut again
    weights = ((0, 4), (1, 5), (2, 6), (3, 7))
    found = parts_of(8, weights, {"bias": shared, "weight": weights})
    assert found.every == tuple(map(Part, weights))


def test_ranks_that_share_tensors_with_different_ones_are_in_several_parts():
    found = parts_of(4, LONE, {"expert": ROWS, "layer": COLUMNS})
    assert found.every == (
        Part((0, 1), ("layer",)),
        Part((0, 2), ("expert",)),
        Part((1, 3), ("expert",)),
        Part((2, 3), ("layer",)),
    )
    assert found.seats == ((0, 1), (4, 2), (5, 3), (6, 7))
    assert found.of_ranks((1, 0)) == (1, 5, 0, 4)
    assert [found.owner_of(seat) for seat in (0, 4, 7)] == [(0, 0), (0, 1), (3, 1)]
    assert found.ranks_of((4, 0, 7)) == (0, 3)
    assert found.seat(3, 1) == 7
    assert found.without()[7] == ("layer",)


def test_what_one_rank_has_alone_is_a_part_of_its_own():
    mine = ((0,), (1, 2, 3))
    found = parts_of(4, ((0,), (1, 3), (2,)), {"mine": mine, "layer": COLUMNS})
    assert Part((0,)) in found.every
    assert [part.ranks for part in found.every] == [(0,), (0, 2), (1, 2, 3), (1, 3)]


@pytest.mark.parametrize("name", ["rate", "expert .. layer"])
def test_where_what_cannot_be_left_out_is_shared_otherwise_ranks_stay_whole(name):
    cuts = {"expert": ROWS, "layer": COLUMNS, name: ROWS}
    assert parts_of(4, LONE, cuts, {name}).every == tuple(map(Part, LONE))


def test_nothing_is_known_of_ranks_that_hold_the_same():
    assert parts_of(4, (), {}) == Parts()
    assert Parts().of_ranks((2, 0)) == (2, 0)


def test_too_many_kinds_leave_ranks_whole():
    count = 12
    pairs = itertools.islice(itertools.combinations(range(count), 2), MOST_KINDS + 1)
    cuts = {
        str(pair): (pair, tuple(rank for rank in range(count) if rank not in pair))
        for pair in pairs
    }
    groups = refined(count, cuts.values())
    assert parts_of(count, groups, cuts).every == tuple(map(Part, groups))


@pytest.mark.parametrize("seed", range(200))
def test_the_parts_of_a_rank_are_all_that_it_holds_and_nothing_else(seed):
    rng = Random(seed)
    count, cuts = rng.choice((3, 4, 6, 8)), {}
    for name in "abcdef"[: rng.randrange(1, 7)]:
        at = [rng.randrange(rng.choice((2, 3))) for _ in range(count)]
        blocks = (tuple(r for r in range(count) if at[r] == value) for value in sorted({*at}))
        cuts[name] = tuple(sorted(blocks))
    cuts = {name: blocks for name, blocks in cuts.items() if len(blocks) > 1}
    if not cuts:
        return
    found = parts_of(count, refined(count, cuts.values()), cuts)
    held = {
        (name, rank): {
            part.ranks for part in found.every if rank in part.ranks and name not in part.without
        }
        for name in cuts
        for rank in range(count)
    }
    for (name, rank), parts in held.items():
        block = next(block for block in cuts[name] if rank in block)
        assert parts, (name, rank)
        assert all({*part} <= {*block} for part in parts), (name, rank)
    # each box of each tensor has a rank that lives if, and only if, each part has one
    for alive in map(set, itertools.product(*[(rank, -1) for rank in range(count)])):
        boxes = all(alive & {*block} for blocks in cuts.values() for block in blocks)
        assert boxes == all(alive & {*part.ranks} for part in found.every), alive
    seats = [seat for each in found.seats for seat in each]
    assert len({*seats}) == len(seats)
    assert sorted(found.of_ranks(range(count))) == sorted(seats)


def test_a_thousand_ranks_and_many_tensors_take_little():
    count, side = 1024, 32
    rows = tuple(tuple(range(at, at + side)) for at in range(0, count, side))
    columns = tuple(tuple(range(at, count, side)) for at in range(side))
    cuts = {f"w{at}": rows if at % 2 else columns for at in range(300)}
    lone = tuple((rank,) for rank in range(count))
    began_s = time.process_time()
    found = parts_of(count, lone, cuts)
    assert time.process_time() - began_s < 1.0
    assert len(found.every) == 2 * side
