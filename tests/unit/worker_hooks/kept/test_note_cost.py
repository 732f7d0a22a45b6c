"""What a rank tells of its notes: medians, not in the first steps, and seldom."""

from worker_hooks.kept.note_cost import EVERY, FIRST, LOOKS, NoteCost


def told(count, cost_of=lambda _: 0.001, step_of=lambda _: 0.1, twice=()):
    """What is told at which commit."""
    cost, now, found = NoteCost(), 5.0, {}
    for number in range(1, count + 1):
        cost.commit_begins(now)
        for _ in range(1 + (number in twice)):
            if (one := cost.noted(cost_of(number))) is not None:
                assert number not in found
                found[number] = one
        now += step_of(number)
    return found


def test_it_is_told_behind_the_first_steps_and_then_seldom():
    first = FIRST + LOOKS
    found = told(first + 2 * EVERY + 1)
    assert list(found) == [first, first + EVERY, first + 2 * EVERY]
    assert all(round(cost_s, 6) == 0.001 for cost_s, _ in found.values())
    assert all(round(step_s, 6) == 0.1 for _, step_s in found.values())


def test_first_steps_and_single_long_ones_do_not_count():
    found = told(FIRST + LOOKS, step_of=lambda number: 60.0 if number in {1, 2, 3, 9} else 0.1)
    assert round(found[FIRST + LOOKS][1], 6) == 0.1
    found = told(FIRST + LOOKS, cost_of=lambda number: 1.0 if number in {1, 2, 9, 12} else 0.001)
    assert found[FIRST + LOOKS][0] == 0.001


def test_a_second_note_of_a_commit_is_told_but_once():
    """As where a loop ends."""
    assert list(told(FIRST + LOOKS, twice={FIRST + LOOKS})) == [FIRST + LOOKS]


def test_what_has_changed_is_told():
    found = told(FIRST + LOOKS + EVERY, cost_of=lambda number: 0.001 if number < 40 else 0.004)
    assert [cost_s for cost_s, _ in found.values()] == [0.001, 0.004]
