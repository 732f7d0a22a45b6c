"""A node's own files in a log folder that several nodes share."""

import json

from support import recorded_runs

from msrun.runs.log_files import Wanted, views
from msrun.runs.run_state import last_status, look
from worker_hooks.contract.layout import RunLayout


def test_each_node_finds_its_own_status_and_log_in_a_shared_folder(tmp_path):
    record = recorded_runs.write(tmp_path, "first", [], recorded_runs.status("first", 3))
    folder = tmp_path / "logs" / "first"
    other = record._replace(record_id="second", node=1)
    assert look(other).status is None
    said = recorded_runs.status("second", 3, state="failed")
    (folder / "node_1.status.json").write_text(json.dumps(said))
    assert look(other).status.state == "failed"
    assert look(record).status.state == "succeeded"
    assert last_status(RunLayout(folder, "first", "", node=1)) is None
    paths = [views(look(each), Wanted(scheduler=True), 0)[0].path.name for each in (record, other)]
    assert paths == ["scheduler.log", "node_1.log"]
