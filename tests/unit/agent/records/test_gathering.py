"""What is shown of a job whose nodes still gather, and what a request to stop it means then."""

import os
from signal import SIGINT, SIGTERM

import pytest

from agent.launch.rank_plan import run_layout
from agent.records import run_record
from agent.records.gathering import SPARE, ShownGathering
from agent.records.stop_note import StopNote, write_note
from agent.spec.job_spec import (
    JobSpec,
    NotStartedError,
    Program,
    ProgramKind,
    StoppedEarlyError,
)
from msrun.runs.run_state import look

SPEC = JobSpec(Program("train.py", (), ProgramKind.SCRIPT, "python"), 2, "r", "20260101-000000-abc")
HOST = os.uname().nodename


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return {"XDG_STATE_HOME": str(tmp_path)}


def shown(environ):
    folder = run_record.writable_folder(environ)
    return ShownGathering(folder, run_layout(SPEC, folder), SPEC, environ)


def found(environ):
    return look(run_record.find(environ, "r"))


def test_a_job_that_gathers_is_a_run_that_waits(environ):
    with shown(environ) as gathering:
        gathering.wait("waiting for nodes: node rank 1 is missing")
        run = found(environ)
        assert run.alive
        assert (run.state, run.ended) == ("starting", False)
        assert run.status.is_gathering
        assert run.status.reason == "waiting for nodes: node rank 1 is missing"
    assert found(environ).status is None  # the run has its own


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (NotStartedError("not all nodes came"), "failed"),
        (StoppedEarlyError("stopped by SIGTERM on a", SIGTERM), "stopped"),
        (KeyboardInterrupt(), "failed"),
    ],
)
def test_what_has_become_of_it_is_shown_afterwards(environ, error, state):
    with pytest.raises(type(error)), shown(environ):
        raise error
    run = found(environ)
    assert (run.state, run.ended) == (state, True)
    assert run.status.reason == (str(error) or "msrun has ended")


def test_of_a_job_that_another_one_follows_nothing_is_left(environ):
    with pytest.raises(LookupError), shown(environ):
        raise LookupError
    assert list(run_record.records(environ)) == []


def test_a_status_that_cannot_be_written_keeps_nobody_from_waiting(environ):
    with shown(environ) as gathering:
        run_record.writable_folder(environ).joinpath(SPEC.record_id, "record.json").unlink()
        run_record.writable_folder(environ).joinpath(SPEC.record_id, "gathering.json").unlink()
        run_record.writable_folder(environ).joinpath(SPEC.record_id).rmdir()
        gathering.wait("waiting")


def test_a_signal_is_for_this_node_and_the_command_for_all(environ):
    with shown(environ) as gathering:
        alone = gathering.asked(SIGINT)
        why = f"stopped by SIGINT on {HOST} before all nodes were here"
        assert str(alone) == f"{why}: the other nodes go on waiting"
        assert (alone.exit_code, alone.is_for_all) == (130, False)
        gathering.leads = True  # nobody waits without this one
        assert str(gathering.asked(SIGINT)) == why
        gathering.leads = False
        write_note(run_record.writable_folder(environ) / SPEC.record_id, StopNote())
        of_all = gathering.asked(SIGTERM)
        assert str(of_all) == f"stopped by SIGTERM on {HOST} before all nodes were here"
        assert (of_all.exit_code, of_all.is_for_all) == (143, True)
        gathering.wait(SPARE)
        write_note(run_record.writable_folder(environ) / SPEC.record_id, StopNote())
        spare = gathering.asked(SIGTERM)
        assert str(spare) == f"stopped by SIGTERM on {HOST}, which waited as a spare node"
        assert not spare.is_for_all
