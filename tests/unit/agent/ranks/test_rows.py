"""Answers of a row are taken as they would be one by one."""

from __future__ import annotations

from random import Random

import pytest

from agent.ranks.rank_set import RankSet
from agent.ranks.rows import due_in


def one_by_one(row, due, owing):
    due, owing, taken = {*due}, None if owing is None else {*owing}, {}
    for rank, word in row:
        if rank not in due or (owing is not None and owing <= {rank}):
            break
        due.discard(rank)
        if owing is not None:
            owing.discard(rank)
        taken[rank] = (rank, word)
    return taken


@pytest.mark.parametrize("seed", range(300))
def test_a_row_is_taken_up_to_what_is_not_due_or_would_be_the_last(seed):
    dice = Random(seed)
    count = dice.choice((3, 20, 100))
    due = {rank for rank in range(count) if dice.random() < dice.choice((0.9, 1.0))}
    owing = dice.choice((None, due, {rank for rank in due if dice.random() < 0.5}, {count}))
    row = [(rank, dice.random()) for rank in dice.sample(range(count), dice.randint(0, count))]
    row += row[:1] * dice.randint(0, 1)
    found = due_in(
        iter(row), lambda one: one[0], RankSet(due), None if owing is None else RankSet(owing)
    )
    expected = one_by_one(row, due, owing)
    assert list(found.items()) == list(expected.items())
