"""A run's folder is made, locked, and free of an old run's files; nothing is overwritten."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent.records.run_folder import abandon_run_folder, open_run_folder
from agent.spec.job_spec import UsageError
from worker_hooks.contract.layout import RunLayout


@pytest.fixture
def layout(tmp_path):
    return RunLayout(tmp_path / "deep" / "logs", "record-1", "run")


def leave_a_run(layout, record_id, text):
    layout.folder.mkdir(parents=True, exist_ok=True)
    for path in (layout.scheduler_log, layout.events, layout.worker_log(0), layout.earlier_worker_log(0, 0), layout.failure):  # fmt: skip
        path.write_text(text)
    layout.status.write_text(json.dumps({"record_id": record_id}) if record_id else "{torn")
    (layout.folder / "errors" / "attempt_0").mkdir(parents=True)


def names(folder):
    return {path.name for path in folder.iterdir()}


RUN_FILES = {"scheduler.log", "events.jsonl", "worker_0.log", "worker_0.attempt_0.log", "failure.json", "status.json", "errors"}  # fmt: skip


def test_a_missing_folder_is_made_with_its_parents(layout):
    os.close(open_run_folder(layout))
    assert names(layout.folder) == {".msrun.lock"}


def test_only_one_run_at_a_time_has_the_folder(layout):
    lock = open_run_folder(layout)
    with pytest.raises(UsageError, match="is in use by another msrun"):
        open_run_folder(layout)
    os.close(lock)
    os.close(open_run_folder(layout))


def test_a_folder_in_use_is_left_as_it_is(layout):
    lock = open_run_folder(layout)
    leave_a_run(layout, "running", "text")
    with pytest.raises(UsageError):
        open_run_folder(layout)
    assert names(layout.folder) == {".msrun.lock", *RUN_FILES}
    os.close(lock)


def test_earlier_runs_are_set_aside_under_their_names(layout):
    for record_id in ("first", "second", "second", None, "../../escape"):
        leave_a_run(layout, record_id, str(record_id))
        if record_id is None:  # no run of ours: a folder of that name is the user's
            (layout.folder / "errors" / "attempt_0").rmdir()
            (layout.folder / "errors").rmdir()
        (layout.folder / "mine.txt").touch()
        os.close(open_run_folder(layout))
    assert names(layout.folder) == {".msrun.lock", "earlier", "mine.txt"}
    earlier = layout.folder / "earlier"
    assert names(earlier) == {"first", "second", "second.2", "unknown", "escape"}
    for name, text in (("first", "first"), ("second.2", "second"), ("unknown", "None")):
        assert names(earlier / name) == (RUN_FILES - {"errors"} if name == "unknown" else RUN_FILES)
        assert (earlier / name / "worker_0.log").read_text() == text


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_the_way_is_named(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a folder: name one, it is made if missing"):
        open_run_folder(RunLayout(tmp_path / place, "record", "run"))


def test_a_place_that_cannot_be_written_is_named():
    with pytest.raises(UsageError, match="/proc/nowhere cannot be written"):
        open_run_folder(RunLayout(Path("/proc/nowhere"), "record", "run"))


def test_a_folder_that_was_made_for_nothing_is_removed(layout):
    lock = open_run_folder(layout)
    layout.scheduler_log.touch()
    abandon_run_folder(layout, lock)
    assert not layout.folder.exists()


def test_a_folder_that_was_there_keeps_what_others_put_into_it(layout):
    layout.folder.mkdir(parents=True)
    (layout.folder / "mine.txt").touch()
    abandon_run_folder(layout, open_run_folder(layout))
    assert "mine.txt" in names(layout.folder)


def test_another_node_sets_aside_only_its_own_files_of_a_shared_folder(layout):
    leave_a_run(layout, "first", "text")
    other = layout._replace(record_id="record-2", node=1)
    for path in (other.scheduler_log, other.events, other.status):
        path.write_text("{}")
    os.close(open_run_folder(other))
    assert names(layout.folder) == {*RUN_FILES, ".msrun.lock.node_1", "earlier"}
    (aside,) = (layout.folder / "earlier").iterdir()
    assert names(aside) == {"node_1.log", "node_1.events.jsonl", "node_1.status.json"}


def test_the_controllers_node_sets_the_ranks_files_aside_and_leaves_other_nodes_theirs(layout):
    leave_a_run(layout, "first", "text")
    other = layout._replace(record_id="record-2", node=1)
    other.scheduler_log.touch()
    os.close(open_run_folder(layout))
    assert names(layout.folder) == {".msrun.lock", "earlier", "node_1.log"}


def test_nodes_that_share_a_folder_do_not_lock_each_other_out(layout):
    locks = [open_run_folder(layout._replace(node=node)) for node in (0, 1, 2)]
    with pytest.raises(UsageError, match="is in use by another msrun"):
        open_run_folder(layout._replace(node=1))
    for lock in locks:
        os.close(lock)
