"""Which run a command without a name means, and that nobody stops a stranger's training."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import click
import pytest

from agent.records import run_record
from agent.records.run_record import Record
from agent.spec.job_spec import UsageError
from msrun.runs import stop
from msrun.runs.choice import chosen


@pytest.fixture
def environ(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    places = {"XDG_STATE_HOME": "state", "HOME": "home", "TMPDIR": "temporary"}
    return {name: str(tmp_path / place) for name, place in places.items()}


def written(environ, name, started, cwd=None, *, alive=False, job=""):
    """A record; of this folder, if no other is given."""
    pid, folder = os.getpid(), run_record.writable_folder(environ)
    born = (run_record.birth(pid) or 0) + (not alive)
    argv = ("msrun", "train.py")
    run_record.write(
        folder,
        Record(name, name, pid, born, "/nowhere", argv, cwd or os.getcwd(), started, job=job),
    )


def terminal(monkeypatch, answer):
    """Somebody sits there, and answers; what was asked."""
    asked = []
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(click, "confirm", lambda text, **_: asked.append(text) or answer)
    return asked


def test_a_run_of_this_folder_is_meant_however_new_others_are(environ):
    written(environ, "old", 1.0)
    written(environ, "new", 2.0)
    written(environ, "others", 3.0, "/elsewhere", alive=True)
    assert chosen(environ, None, "msrun status").record_id == "new"
    written(environ, "alive", 0.5, alive=True)
    assert chosen(environ, None, "msrun status").record_id == "alive"
    assert chosen(environ, "oth", "msrun status").record_id == "others"


def test_a_run_of_another_folder_is_named_and_not_taken(environ):
    with pytest.raises(UsageError, match="no run is recorded"):
        chosen(environ, None, "msrun logs")
    written(environ, "others", 3.0, "/elsewhere", alive=True)
    said = "no run was started in this folder; others runs in /elsewhere: msrun logs others"
    with pytest.raises(UsageError, match=said):
        chosen(environ, None, "msrun logs")


@pytest.mark.parametrize("answer", [True, False])
def test_on_a_terminal_it_is_asked_for(environ, monkeypatch, answer):
    written(environ, "others", 3.0, "/elsewhere")
    asked = terminal(monkeypatch, answer)
    if answer:
        assert chosen(environ, None, "msrun top").record_id == "others"
    else:
        with pytest.raises(UsageError, match="msrun top others"):
            chosen(environ, None, "msrun top")
    (question,) = asked
    assert "others ended in /elsewhere" in question


def test_a_script_never_stops_a_run_of_another_folder_without_its_name(environ):
    written(environ, "others", 3.0, "/elsewhere", alive=True)
    with pytest.raises(UsageError, match="msrun stop others"):
        stop._choose(environ, None)
    assert stop._choose(environ, "others").record_id == "others"
    written(environ, "mine", 1.0, alive=True)
    assert stop._choose(environ, None).record_id == "mine"
    written(environ, "second", 2.0, alive=True)
    with pytest.raises(UsageError, match="2 runs are alive"):
        stop._choose(environ, None)


def test_of_several_nodes_of_one_job_here_the_one_that_decides_is_stopped(environ):
    written(environ, "worker", 3.0, alive=True, job="scheduler")
    written(environ, "scheduler", 2.0, alive=True)
    written(environ, "another", 1.0, alive=True, job="scheduler")
    assert stop._choose(environ, None).record_id == "scheduler"
    written(environ, "mine", 4.0, alive=True)
    with pytest.raises(UsageError, match="4 runs are alive"):
        stop._choose(environ, None)
