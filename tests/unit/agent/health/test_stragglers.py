"""Which rank is persistently slower than its peers, by what their status pages tell."""

import random

import pytest

from agent.health.stragglers import Stragglers
from agent.workers.tempo import Tempo, tempo
from worker_hooks.contract.status_page import Pace

MS = 1_000_000


def ring(own_ms, newest=64, count=64, step_ms=100):
    """Paces of a rank whose steps are as long as everybody's; the rest is waiting."""
    own = own_ms if isinstance(own_ms, list) else [own_ms] * count
    steps = range(newest - count + 1, newest + 1)
    return [
        Pace(step, step_ms * MS, int((step_ms - each) * MS))
        for step, each in zip(steps, own, strict=True)
    ]


def looks(stragglers, owns, count, first=64, fresh=20, steps=64):
    """What each look finds new: who began, who ended."""
    found = []
    for look in range(count):
        newest = first + look * fresh
        change = stragglers.look({n: tempo(ring(own, newest, steps)) for n, own in owns.items()})
        found.append(([slow.rank for slow in change.began], list(change.ended)))
    return found


def test_the_figures_of_a_rank():
    paces = [Pace(step, step * MS, MS) for step in range(1, 65)]
    assert tempo(paces) == pytest.approx(Tempo(64, 64, 0.0325, 0.061, 0.0315, 0.060))
    assert tempo([]) is None
    assert tempo(paces[:1]) == pytest.approx(Tempo(1, 1, 0.001, 0.001, 0.0, 0.0))


def test_a_slow_rank_is_named_at_the_third_look_and_once():
    stragglers = Stragglers()
    found = looks(stragglers, {0: 50, 1: 52, 2: 90, 3: 48}, 6)
    assert found == [([], []), ([], []), ([2], []), ([], []), ([], []), ([], [])]
    assert (
        stragglers.named[2].words
        == "rank 2 is slower than its peers: 90 ms of its own a step, its peers 50 ms"
    )
    assert looks(stragglers, {0: 50, 1: 52, 2: 55, 3: 48}, 2, first=300) == [([], [2]), ([], [])]
    assert stragglers.named == {}


@pytest.mark.parametrize(
    "owns",
    [
        pytest.param({0: 50, 1: 61, 2: 50}, id="22 % more"),
        pytest.param({0: 5, 1: 9.5, 2: 5}, id="4.5 ms more"),
        pytest.param({0: 50}, id="no peers"),
        pytest.param({0: 50, 1: 90, 2: 91, 3: 90}, id="a majority is slow"),
    ],
)
def test_these_are_no_stragglers(owns):
    assert looks(Stragglers(), owns, 6) == [([], [])] * 6


def test_few_steps_or_no_new_ones_name_nobody():
    owns = {0: 50, 1: 52, 2: 90}
    assert looks(Stragglers(), owns, 6, steps=31) == [([], [])] * 6
    assert looks(Stragglers(), owns, 9, fresh=1) == [([], [])] * 9


def test_a_rank_that_is_slow_now_and_then_is_no_straggler():
    stragglers = Stragglers()
    for look in range(12):
        owns = {0: 50, 1: 50, 2: 90 if look % 3 else 50}
        assert looks(stragglers, owns, 1, first=64 + 20 * look) == [([], [])]


def test_rare_slow_steps_of_all_ranks_name_nobody():
    draw = random.Random(5)
    stragglers = Stragglers()
    for look in range(200):
        owns = {
            n: [50 * (20 if draw.random() < 0.05 else draw.uniform(0.9, 1.1)) for _ in range(64)]
            for n in range(8)
        }
        tempos = {n: tempo(ring(own, 64 + 20 * look, step_ms=1000)) for n, own in owns.items()}
        assert stragglers.look(tempos) == ((), ())


def test_a_straggler_that_is_gone_is_ended():
    stragglers = Stragglers()
    looks(stragglers, {0: 50, 1: 52, 2: 90}, 3)
    assert looks(stragglers, {0: 50, 1: 52}, 1, first=104) == [([], [2])]
