"""When a checkpoint is due; ranks that share a clock come to the same steps."""

from __future__ import annotations

import random

import pytest

from worker_hooks.checkpoint.schedule import (
    Announcer,
    Listener,
    Seconds,
    Steps,
    announcement_file,
)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_steps_are_counted_since_training_began():
    assert [step for step in range(1, 11) if Steps(3).is_due(step)] == [3, 6, 9]
    assert not any(Steps(0).is_due(step) for step in range(1, 11))


def test_seconds_count_from_the_time_before():
    clock = Clock()
    policy = Seconds(10, clock)
    due = []
    for step in range(1, 9):
        clock.now += 4
        if policy.is_due(step):
            due.append((step, clock.now))
    assert due == [(3, 112.0), (6, 124.0)]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_in_lock_step_save_the_same_steps(tmp_path, seed):
    """A rank may be anywhere between the end of a step and the collective of the next."""
    chance, clock = random.Random(seed), Clock()
    path = announcement_file(tmp_path, "CKP", "life")
    listeners = [Listener(path) for _ in range(3)]
    announcer = Announcer(Seconds(5, clock), path)
    policies = [announcer, *listeners]
    saved = [[] for _ in policies]
    step = [0] * len(policies)
    for _ in range(400):
        ready = [rank for rank in range(4) if step[rank] <= min(step)]
        rank = chance.choice(ready)  # nobody ends a step that others have not begun
        step[rank] += 1
        clock.now += chance.random()
        if policies[rank].is_due(step[rank]):
            saved[rank].append(step[rank])
    last = min(step)
    common = [[each for each in one if each <= last] for one in saved]
    assert all(one == common[0] for one in common)
    assert len(common[0]) > 5
    for policy in policies:
        policy.close()
    assert list(tmp_path.iterdir()) == []


def test_who_comes_before_rank_0_hears_nothing(tmp_path):
    path = announcement_file(tmp_path, "CKP", "life")
    listener = Listener(path)
    assert not listener.is_due(1)
    listener.close()
