"""How often the time of steps is noted, and of which ranks."""

import json

from agent.health.step_times import EVERY_S, MOST_RANKS, StepTimes
from agent.records.journal import Journal
from agent.workers.tempo import Tempo
from agent.workers.worker import Worker

DAY_S, MONTH_S = 86_400, 30 * 86_400


def workers(count, step, step_s=0.02):
    found = [Worker(rank, rank, 0) for rank in range(count)]
    for worker in found:
        own_s = step_s * (1 + worker.rank)
        worker.tempo = Tempo(64, step, own_s, own_s, own_s, own_s)
    return found


def noted(count, until_s, step_s=EVERY_S):
    lines = []
    times = StepTimes(Journal(None, print, lines.append), 0.0)
    now_s, step = 0.0, 0
    while now_s < until_s:
        now_s, step = now_s + step_s, step + 1
        times.note(workers(count, step), now_s)
    return [json.loads(line) for line in lines]


def test_a_long_run_makes_few_notes():
    assert len(noted(1, 60)) == 30
    assert 200 < len(noted(1, DAY_S, 20.0)) < 400
    assert len(noted(1, MONTH_S, 600.0)) < 600


def test_all_of_few_ranks_and_three_of_many():
    (one,) = noted(3, 1)
    assert (one["step"], one["ranks"], one["median_s"]) == (1, [0, 1, 2], [0.02, 0.04, 0.06])
    (many,) = noted(MOST_RANKS + 1, 1)
    assert many["ranks"] == [0, 8, 16] and many["median_s"] == [0.02, 0.18, 0.34]


def test_without_new_steps_there_is_nothing_to_note():
    lines = []
    times = StepTimes(Journal(None, print, lines.append), 0.0)
    for now_s in (0.0, 10.0, 20.0):
        times.note(workers(2, 5), now_s)
    times.note([Worker(0, 0, 0)], 30.0)
    assert len(lines) == 1
