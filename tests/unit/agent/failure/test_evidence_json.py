"""What one node found of its ranks' ends arrives at another one as it was found."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from agent.failure.evidence import ErrorFile, Evidence, WorkerEnd
from agent.failure.evidence_json import as_heard, as_json, from_json
from agent.failure.log_excerpt import Traceback

END = WorkerEnd(
    rank=3,
    local_rank=1,
    pid=77,
    host="b",
    exit_code=None,
    signal=9,
    at_epoch_s=1_700_000_000.0,
    order=4,
    stopped_by_us=True,
    error_file=Path("/l/1.json"),
    log=Path("/l/worker_3.log"),
    attempt=2,
    hung="made no progress",
    ended_for="rank 1 failed",
    amid="in forward of step 3",
    told="--resume",
)
FULL = Evidence(
    end=END,
    error=ErrorFile("ValueError: bad", "Traceback ...", 1_699_999_990, {"message": {"a": [1]}}),
    error_problem="unreadable",
    logged=Traceback("Traceback ...", "ValueError: bad", "t.py", 2),
    log_tail=("one", "two"),
    oom_kills=1,
    oom_elsewhere=2,
    device_fault="memory",
)
BARE = Evidence(WorkerEnd(0, 0, 7, "a", 1, None, 5.0, 0))


def travelled(evidence):
    return from_json(json.loads(json.dumps(as_json(evidence))))


@pytest.mark.parametrize("evidence", [FULL, BARE], ids=["full", "bare"])
def test_evidence_arrives_as_it_was(evidence):
    assert travelled(evidence) == evidence


def test_every_field_is_in_the_full_example():
    defaults = Evidence(END)
    names = {field.name for field in fields(Evidence)} - {"end"}
    assert all(getattr(FULL, name) != getattr(defaults, name) for name in names)


@pytest.mark.parametrize("found", [{}, [], None, {**as_json(BARE), "end": {}}, {"end": 3}])
def test_what_is_no_evidence_is_an_error(found):
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_json(found)


def test_evidence_is_dated_by_when_it_was_heard():
    heard = as_heard(FULL, 1_800_000_000.0, 9)
    assert (heard.end.at_epoch_s, heard.end.order) == (1_800_000_000.0, 9)
    assert heard.error.timestamp == 1_799_999_990  # as long before its end as there
    assert heard.logged == FULL.logged


def test_evidence_without_an_error_or_its_time_is_dated_too():
    assert as_heard(BARE, 9.0, 1).error is None
    timeless = Evidence(END, ErrorFile("bad"))
    assert as_heard(timeless, 9.0, 1).error.timestamp is None
