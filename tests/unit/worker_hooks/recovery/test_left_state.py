"""What ranks that save without msrun read in memory, as the dead alone have it."""

import pytest

from worker_hooks.recovery.left_state import LeftPlan, plan_left

ALONE = ((0,), (1,))  # living ranks without replicas
PAIR = ((0, 2),)  # rank 2 is dead, and rank 0 holds the same

PLANS = [
    ("the dead have the step", ALONE, [2], {2: (5, 4)}, LeftPlan(5, {2: (2,)})),
    ("whatever others have", ALONE, [2, 3], {0: (4,), 2: (5,), 3: (5, 4)}, LeftPlan(5, {2: (2,), 3: (3,)})),
    ("a rank that lives holds the same", PAIR, [2], {2: (5,)}, None),
    (
        "they have the step before, and so have all",
        ALONE,
        [2],
        {0: (5, 4), 1: (5, 4), 2: (4, 3)},
        LeftPlan(4, {0: (0,), 1: (1,), 2: (2,)}),
    ),
    (
        "one of those that hold the same is enough",
        ((0, 1),),
        [2, 3],
        {0: (5,), 1: (5, 4), 2: (4,), 3: (5, 4)},
        LeftPlan(4, {1: (0, 1), 2: (2,), 3: (3,)}),
    ),
    ("one that lives has no older step", ALONE, [2], {0: (5,), 1: (5, 4), 2: (4, 3)}, None),
    ("a dead one has none at all", ALONE, [2, 3], {0: (5, 4), 1: (5, 4), 2: (4,)}, None),
    ("no step is newer than those that live have", ALONE, [2], {0: (5,), 1: (5,), 2: (6,)}, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("alike", "dead", "left", "plan"), [each[1:] for each in PLANS], ids=[each[0] for each in PLANS]
)
def test_the_newest_step_of_all_is_read(alike, dead, left, plan):
    assert plan_left(5, alike, dead, left) == plan
