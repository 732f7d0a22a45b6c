"""What `msrun stop` tells the run beside its signal."""

import json

import pytest

from agent.records.run_record import Record
from agent.records.stop_note import StopNote, take_note
from agent.spec.job_spec import UsageError
from msrun.runs import stop

FIELDS = {"record_id": "mine", "run_id": "", "pid": 1, "born": 1, "log_dir": "", "argv": ()}
RUN = Record(**FIELDS, cwd="", started=0.0)


@pytest.mark.parametrize(
    ("may_leave", "gathers", "note"),
    [(False, False, None), (True, False, StopNote()), (False, True, StopNote())],
)
def test_where_a_signal_may_mean_one_node_it_is_told_that_the_job_is_meant(
    tmp_path, may_leave, gathers, note
):
    run = RUN._replace(may_leave=may_leave)
    stop._write_note(run, tmp_path, StopNote(), is_gathering=gathers)
    assert take_note(tmp_path) == note


@pytest.mark.parametrize(
    ("note", "may_leave", "why"),
    [
        (
            StopNote(),
            True,
            "that the whole job is meant: SIGTERM to its msrun (pid 1) would end one",
        ),
        (StopNote(is_now=True), True, "that the whole job is meant"),
        (StopNote(is_now=True), False, "how patient to be: msrun stop mine without options needs"),
    ],
)
def test_what_cannot_be_told_is_an_error_that_says_what_would_follow(
    tmp_path, note, may_leave, why
):
    run = RUN._replace(may_leave=may_leave)
    with pytest.raises(UsageError) as found:
        stop._write_note(run, tmp_path / "gone", note, is_gathering=False)
    assert "cannot be written (No such file or directory), so the run cannot learn" in str(
        found.value
    )
    assert why in str(found.value)


@pytest.mark.parametrize(
    ("events", "is_stopping"),
    [
        ([{"event": "StopRequested", "leaves": False}], True),
        ([{"event": "StopRequested"}], True),
        ([{"event": "StopRequested", "leaves": True}], False),
        ([{"event": "StopRequested", "leaves": True}, {"event": "StopRequested"}], True),
        ([{"event": "Started"}], False),
    ],
)
def test_a_job_that_a_node_leaves_does_not_stop_yet(tmp_path, events, is_stopping):
    """Else `msrun stop` would send no signal, as each makes a run less patient."""
    (tmp_path / "events").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert stop._has_request(tmp_path / "events") is is_stopping
