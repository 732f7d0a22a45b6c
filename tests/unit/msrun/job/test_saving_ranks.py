"""A resume waits for the ranks of a killed msrun that still save."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from support.recorded_runs import BEGAN, status, write

from msrun.job.saving_ranks import await_ranks


@pytest.fixture
def rank():
    """A process that lives as long as its stdin is open."""
    with subprocess.Popen("cat", stdin=subprocess.PIPE) as process:
        yield process


def lost(folder, *pids, updated=None, **changes):
    """A run whose msrun was killed as it had these ranks."""
    said = status("run", len(pids), state="running", ended=None, updated=updated or time.time())
    for worker, pid in zip(said["workers"], pids, strict=True):
        worker |= {"pid": pid, "state": "running", "ended": None, **changes}
    return write(folder, "run", [], said)


def test_it_waits_until_they_have_left(tmp_path, rank):
    record, said = lost(tmp_path, rank.pid), []

    def say(sentence):
        said.append(sentence)
        rank.stdin.close()  # it has saved, and ends

    await_ranks(record, say)
    assert said == ["run run has lost its msrun: waiting for rank 0 to save and end"]
    assert rank.wait() == 0


def test_it_does_not_wait_for_ever(tmp_path, rank):
    said = []
    await_ranks(lost(tmp_path, rank.pid), said.append, most_s=0.01)
    assert said[1:] == ["not waiting any longer than 0.01 s for rank 0"]


def test_a_process_that_has_got_the_number_of_a_rank_is_none(tmp_path, rank):
    said = []
    await_ranks(lost(tmp_path, rank.pid, updated=BEGAN), said.append)
    assert said == []


@pytest.mark.parametrize("changes", [{"ended": BEGAN}, {"pid": None}])
def test_a_rank_that_has_ended_is_not_awaited(tmp_path, rank, changes):
    said = []
    await_ranks(lost(tmp_path, rank.pid, **changes), said.append)
    assert said == []


def test_a_rank_of_another_node_is_not_looked_for_here(tmp_path, rank):
    record, said = lost(tmp_path, rank.pid, rank.pid), []
    record = record._replace(host=socket.gethostname(), ranks=(1,))
    await_ranks(record, said.append, most_s=0.01)
    assert said[0].endswith("waiting for rank 1 to save and end")


@pytest.mark.parametrize(("host", "count"), [("", 0), (socket.gethostname(), 2)])
def test_on_a_node_whose_controller_was_on_another_one_its_own_ranks_are_awaited(
    tmp_path, rank, host, count
):
    record, said = lost(tmp_path, rank.pid), []
    path = Path(record.log_dir) / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "node-0"}))
    await_ranks(record._replace(host=host, ranks=(0,)), said.append, most_s=0.01)
    assert len(said) == count


def test_nobody_is_awaited_of_a_run_that_has_ended(tmp_path, rank):
    record, said = lost(tmp_path, rank.pid), []
    path = Path(record.log_dir) / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "failed"}))
    await_ranks(record, said.append)
    assert said == []
    assert os.path.exists(f"/proc/{rank.pid}")
