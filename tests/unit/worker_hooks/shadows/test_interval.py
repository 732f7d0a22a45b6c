"""Copies of processes take a small part of the time, whatever a step and a copy cost."""

from itertools import pairwise

import pytest

from worker_hooks.shadows.interval import MOST_S, SHARE, Interval


def trained(step_s, fork_s, extra_s=0.0, first_steps=1, until_s=900.0, slower=None):
    """The steps of the copies, and the share that they took of the later half of the time."""
    now, step, due = 0.0, 1, 1
    interval, cuts, spent = Interval(), [], []
    since, seconds = 0, step_s
    while now < until_s:
        if step == due:
            now += fork_s
            told = interval.cut(step, now, fork_s)
            cuts.append((now, step))
            spent.append((now, fork_s + extra_s * first_steps))
            since = 0
        else:
            told = interval.stepped(step, now, seconds)
        assert not told or told > step
        due = told or due
        step += 1
        seconds = step_s * (slower if slower and now > until_s / 2 else 1)
        seconds += extra_s if since < first_steps else 0.0
        since += 1
        now += seconds
    later = [cost for at, cost in spent if at > until_s / 2]
    return cuts, sum(later) / (until_s / 2)


@pytest.mark.parametrize(
    ("step_s", "fork_s", "extra_s", "first_steps"),
    [
        (0.001, 0.02, 0.01, 2),
        (0.011, 0.03, 0.03, 1),
        (0.1, 0.02, 0.2, 1),
        (2.0, 0.1, 0.9, 1),
        (30.0, 0.1, 0.3, 1),
    ],
)
def test_copies_take_about_two_percent(step_s, fork_s, extra_s, first_steps):
    cuts, share = trained(step_s, fork_s, extra_s, first_steps)
    assert share <= SHARE * 1.1, cuts
    apart = [after - before for (before, _), (after, _) in pairwise(cuts)]
    assert max(apart) <= MOST_S + 2 * step_s + 2
    assert apart[-1] >= 0.4 * min((fork_s + extra_s) / SHARE, MOST_S)


def test_long_steps_are_copied_each():
    cuts, _ = trained(20.0, 0.05)
    assert [step for _, step in cuts[-3:]] == [cuts[-3][1] + each for each in range(3)]


def test_what_is_repeated_stays_bounded_if_steps_become_slow():
    cuts, _ = trained(0.01, 0.1, slower=500)
    apart = [after - before for (before, _), (after, _) in pairwise(cuts)]
    assert max(apart) <= MOST_S + 3 * 5.0


def test_after_a_death_the_next_copy_is_soon():
    interval = Interval()
    step, due = 1, interval.cut(1, 0.0, 0.5)
    while due - step < 50:  # intervals double, as a copy costs much
        if step == due:
            due = interval.cut(step, step * 0.125, 0.5)
        else:
            due = interval.stepped(step, step * 0.125, 0.125) or due
        step += 1
    assert interval.cut(step, step * 0.125, None) == step + 8  # a second


def test_a_copy_that_was_woken_has_measured_no_fork():
    interval = Interval()
    assert not interval.cut(1, 0.0, None)
    told = [interval.stepped(1 + each, 0.1 * each, 0.1) for each in range(1, 4)]
    assert [each for each in told if each] == [11]  # a second: what a copy costs is unknown
