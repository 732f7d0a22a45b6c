"""How far a training is, seen from outside by what its ranks record."""

import json

import pytest

from msrun.trials.step_watch import FIRST_STEP_S, StepWatch
from worker_hooks.contract.layout import DrillLayout


@pytest.fixture
def layout(tmp_path):
    return DrillLayout(tmp_path)


def record(layout, rank, *lines, end="\n"):
    with open(layout.lines(rank), "a") as file:
        file.write("\n".join(map(json.dumps, lines)) + end)


def commit(step, at):
    return {"commit": step, "at": at}


def test_a_step_begins_with_the_first_commit_of_the_one_before(layout):
    watch = StepWatch(layout)
    watch.look()
    assert (watch.step, watch.moment_in(1, 0.5)) == (0, None)  # nobody has begun
    record(layout, 0, {"life": 0, "run": "a", "at": 1.0})
    watch.look()
    assert watch.moment_in(1, 0.5) == 0.0  # now
    assert watch.moment_in(3, 0.5) is None
    record(layout, 0, commit(1, 2.0), commit(2, 4.5))
    record(layout, 1, commit(1, 2.5), commit(2, 4.0))
    watch.look()
    assert watch.step == 2
    assert watch.moment_in(3, 0.5) == pytest.approx(4.0 + 0.5 * (4.0 - 2.0))
    assert watch.moment_in(2, 0.5) == 0.0  # it is over
    assert watch.moment_in(4, 0.5) is None


def test_what_is_only_half_written_is_read_later(layout):
    watch = StepWatch(layout)
    record(layout, 0, {"life": 2, "run": "a", "at": 1.0}, commit(1, 2.0), end="")
    watch.look()
    assert (watch.step, watch.attempt) == (0, 2)
    record(layout, 0, end="\n")
    watch.look()
    assert watch.step == 1
    assert watch.moment_in(2, 1.0) == pytest.approx(2.0 + FIRST_STEP_S)
