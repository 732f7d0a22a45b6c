"""What ranks that save without msrun read in memory, as no living one holds it."""

import pytest

from worker_hooks.recovery.left_state import LeftPlan, plan_left

THREE = ((0,), (1,), (2,))  # no two ranks hold the same
PAIRS = ((0, 2), (1, 3))

PLANS = [
    ("a dead rank has the step", THREE, [0, 1], {2: (5, 4)}, LeftPlan(5, {2: (2,)})),
    ("two have it", THREE, [1], {0: (5,), 1: (4,), 2: (5, 4)}, LeftPlan(5, {0: (0,), 2: (2,)})),
    ("others hold all of it", PAIRS, [0, 1], {2: (5,), 3: (5,)}, None),
    ("both of a pair are dead", PAIRS, [0], {1: (4,), 3: (5,)}, LeftPlan(5, {3: (1, 3)})),
    ("one is dead, the other one torn", PAIRS, [0, 2], {3: (5, 4)}, LeftPlan(5, {3: (1, 3)})),
    (
        "it has the step before, and so have all",
        THREE,
        [0, 1],
        {0: (5, 4), 1: (5, 4), 2: (4, 3)},
        LeftPlan(4, {0: (0,), 1: (1,), 2: (2,)}),
    ),
    (
        "one of those that hold the same is enough",
        PAIRS,
        [0, 2],
        {0: (5,), 2: (5, 4), 1: (4, 3)},
        LeftPlan(4, {2: (0, 2), 1: (1, 3)}),
    ),
    ("one that lives has no older step", THREE, [0, 1], {0: (5,), 1: (5, 4), 2: (4, 3)}, None),
    ("a dead one has none at all", THREE, [0, 1], {0: (5, 4), 1: (5, 4)}, None),
    (
        "its step is newer than what the others hold",
        THREE,
        [0, 1],
        {0: (5,), 1: (5,), 2: (6,)},
        None,
    ),
    ("nobody has anything", THREE, [0, 1], {}, None),
]


@pytest.mark.parametrize(
    ("groups", "whole", "left", "plan"),
    [each[1:] for each in PLANS],
    ids=[each[0] for each in PLANS],
)
def test_the_newest_step_of_all_parts_is_read(groups, whole, left, plan):
    assert plan_left(5, groups, whole, left) == plan
