"""Whether notes of where the state lies are worth their time: one answer for all ranks."""

from itertools import permutations
from random import Random

import pytest

from agent.ranks.note_costs import BUDGET, NoteCosts
from agent.ranks.rank_set import RankSet

ALL = RankSet(range(3))
CHEAP, DEAR = (0.0004, 0.2), (0.0015, 0.2)


def told(*measured):
    costs = NoteCosts()
    for rank, (cost_s, step_s) in enumerate(measured):
        costs = costs.told(rank, cost_s, step_s)
    return costs


def test_nothing_is_known_before_all_have_measured():
    for count in range(3):
        assert not told(*[DEAR] * count).are_known(ALL)
        assert told(*[DEAR] * count).why_too_dear(ALL) == ""
    assert told(DEAR, DEAR, DEAR).are_known(ALL)


def test_the_dearest_note_and_the_shortest_step_count():
    assert told(CHEAP, CHEAP, CHEAP).why_too_dear(ALL) == ""
    why = told(CHEAP, DEAR, CHEAP).why_too_dear(ALL)
    assert why == "to note where the state lies takes 0.75% of a step, more than 0.5%"
    assert "takes 2.00% of a step" in told(CHEAP, CHEAP, (0.0001, 0.02)).why_too_dear(ALL)


@pytest.mark.parametrize("step_s", [0.0, -1.0])
def test_a_clock_that_stands_still_makes_nothing_cheap(step_s):
    assert "takes inf% of a step" in told(CHEAP, CHEAP, (0.0001, step_s)).why_too_dear(ALL)


def test_what_a_rank_measured_last_counts():
    costs = told(CHEAP, DEAR, CHEAP).told(1, *CHEAP)
    assert costs.why_too_dear(ALL) == ""


def test_the_order_of_what_ranks_say_changes_nothing_and_no_rank_is_held_up_beyond_the_budget():
    dice = Random(3)
    for _ in range(300):
        measured = [(dice.uniform(0, 0.002), dice.uniform(0.05, 0.3)) for _ in range(3)]
        said = set()
        for order in permutations(range(3)):
            costs = NoteCosts()
            for rank in order:
                costs = costs.told(rank, *measured[rank])
            said.add(costs.why_too_dear(ALL))
        (why,) = said
        slowest = max(cost_s for cost_s, _ in measured)
        assert bool(why) == any(slowest > BUDGET * step_s for _, step_s in measured)
