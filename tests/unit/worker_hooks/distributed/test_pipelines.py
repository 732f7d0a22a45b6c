"""Schedules of torch's pipelines begin anew, whichever kind they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from worker_hooks.distributed import pipelines

KINDS = [
    (schedules.ScheduleGPipe, "_stage"),
    (schedules.Schedule1F1B, "_stage"),
    (schedules.ScheduleInterleaved1F1B, "_stages"),
]


def began(kind, prefix):
    """One that has made a step; a real one needs process groups."""
    schedule = object.__new__(kind)
    vars(schedule).update(
        dict.fromkeys([f"{prefix}_forward_initialized", f"{prefix}_backward_initialized"], True)
    )
    return schedule


@pytest.mark.parametrize(("kind", "prefix"), KINDS)
def test_the_next_step_is_like_the_first(kind, prefix):
    schedule = began(kind, prefix)
    assert pipelines.are_there()
    assert not pipelines.why_not_anew()
    pipelines.begin_anew()
    assert not any(vars(schedule).values())


def test_a_schedule_that_cannot_begin_anew_is_said():
    schedule = object.__new__(schedules.ScheduleGPipe)
    assert schedule is not None
    assert pipelines.why_not_anew() == pipelines.UNKNOWN
    with pytest.raises(RuntimeError, match="cannot start anew"):  # made since that was asked
        pipelines.begin_anew()


def test_stages_of_older_versions_keep_what_the_first_step_has_found():
    schedule = began(schedules.ScheduleGPipe, "_stage")
    schedule._stage = SimpleNamespace(inputs_meta=())
    assert pipelines.why_not_anew() == pipelines.UNKNOWN
