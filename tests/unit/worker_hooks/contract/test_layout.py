"""Every path of a run, and a file that is replaced whole or not at all."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.layout import CheckpointLayout, RunLayout, runs_folder

PLAIN = RunLayout(folder=Path("/l"), record_id="rec", run_id="job")
THIRD = PLAIN._replace(node=2)
TREE = RunLayout(folder=Path("/l"), record_id="rec", run_id="job", stem="w", torchrun_tree=True)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (PLAIN.worker_log(3), "/l/worker_3.log"),
        (PLAIN.earlier_worker_log(3, 1), "/l/worker_3.attempt_1.log"),
        (TREE.worker_log(11), "/l/w_11.log"),
        (PLAIN.scheduler_log, "/l/scheduler.log"),
        (PLAIN.events, "/l/events.jsonl"),
        (PLAIN.status, "/l/status.json"),
        (PLAIN.failure, "/l/failure.json"),
        (PLAIN.lock, "/l/.msrun.lock"),
        (PLAIN.error_file(0, 2), "/l/errors/attempt_0/2.json"),
        (TREE.error_file(1, 2), "/l/job_rec/attempt_1/2/error.json"),
        (TREE.stream(0, 12, "stderr"), "/l/job_rec/attempt_0/12/stderr.log"),
        (THIRD.worker_log(3), "/l/worker_3.log"),  # ranks are numbered through all nodes
        (THIRD.scheduler_log, "/l/node_2.log"),
        (THIRD.events, "/l/node_2.events.jsonl"),
        (THIRD.status, "/l/node_2.status.json"),
        (THIRD.failure, "/l/node_2.failure.json"),
        (THIRD.lock, "/l/.msrun.lock.node_2"),
        (THIRD.error_file(0, 1), "/l/errors/attempt_0/node_2_1.json"),
        (TREE.filtered(2, "stdout"), "/l/job_rec/attempt_2/filtered_stdout.log"),
    ],
)
def test_a_path(path, expected):
    assert str(path) == expected


PERIODIC = CheckpointLayout(Path("/c"), "CKP", 2, 50, "rec")
BROKEN = PERIODIC._replace(prefix="a-1", is_breakpoint=True, record_id="")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (PERIODIC.folder, "/c/CKP-2_50"),
        (PERIODIC.unfinished, "/c/CKP-2_50.rec_tmp"),
        (PERIODIC.place.folder, "/c/CKP-2_50"),
        (PERIODIC.shard(3), "rank_3/CKP-2_50.safetensors"),
        (PERIODIC.part(3), "rank_3.part.json"),
        (BROKEN.folder, "/c/a-1-2_50_breakpoint"),
        (BROKEN.unfinished, "/c/a-1-2_50_breakpoint_tmp"),
        (BROKEN.shard(0), "rank_0/a-1-2_50_breakpoint.safetensors"),
    ],
)
def test_a_path_of_a_periodic_checkpoint(path, expected):
    assert str(path) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/h"}, ["/h/.local/state/msrun/runs"]),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, ["/h/.local/state/msrun/runs"]),
        ({"HOME": ""}, []),
        ({}, []),
    ],
)
def test_run_records_have_a_place_without_a_home(environ, expected):
    candidates = [str(folder) for folder in runs_folder(environ, 1000)]
    assert candidates == [*expected, f"{tempfile.gettempdir()}/msrun-1000/runs"]


def test_a_state_home_that_is_set_is_the_only_one():
    environ = {"XDG_STATE_HOME": "/x", "HOME": "/h", "TMPDIR": "/t"}
    assert list(runs_folder(environ, 1000)) == [Path("/x/msrun/runs")]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "status.json"
    path.write_bytes(b"old")
    return path


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("content", [b"", b"new", b"\0" * 100_000])
def test_a_file_is_replaced_and_nothing_else_remains(file, content, durable):
    write_atomic(file, content, durable=durable)
    assert file.read_bytes() == content
    assert os.listdir(file.parent) == [file.name]


def test_a_file_is_made(tmp_path):
    write_atomic(tmp_path / "a name with spaces", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]


@pytest.mark.parametrize("step", ["replace", "fsync"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_trouble_before_the_rename_leaves_the_old_file(file, monkeypatch, step, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        write_atomic(file, b"new")
    assert file.read_bytes() == b"old"
    assert os.listdir(file.parent) == [file.name]


def test_a_crash_before_the_rename_leaves_the_old_file(file, monkeypatch):
    """Killed on the spot: no clean-up runs, and what remains does not look like a file of ours."""
    monkeypatch.setattr(os, "replace", lambda *_: os._exit(0))
    if (child := os.fork()) == 0:
        write_atomic(file, b"new")
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert file.read_bytes() == b"old"
    (stray,) = set(os.listdir(file.parent)) - {file.name}
    assert stray.startswith(".status.json.")
    assert stray.endswith("_tmp")


def test_a_reader_keeps_the_old_file_whole(file):
    with file.open("rb") as reader:
        write_atomic(file, b"new")
        assert reader.read() == b"old"


def recorded(monkeypatch):
    calls = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd):
        kind = "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"{os.fstat(fd).st_size} bytes"
        calls.append(f"fsync {kind}")
        real_fsync(fd)

    def replace(old, new):
        calls.append("rename")
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    return calls


def test_a_durable_file_is_on_disk_before_it_has_its_name_and_the_name_before_the_return(
    file, monkeypatch
):
    calls = recorded(monkeypatch)
    write_atomic(file, b"new")
    assert calls == ["fsync 3 bytes", "rename", "fsync folder"]


def test_a_file_that_need_not_survive_a_power_cut_costs_no_fsync(file, monkeypatch):
    calls = recorded(monkeypatch)
    write_atomic(file, b"new", durable=False)
    assert calls == ["rename"]


def test_no_descriptor_is_left_open(file):
    before = os.listdir("/proc/self/fd")
    write_atomic(file, b"new")
    assert os.listdir("/proc/self/fd") == before


def test_a_file_has_the_permissions_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "status.json", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "status.json").stat().st_mode) == 0o640


def test_a_missing_folder_is_the_callers_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "nowhere" / "status.json", b"new")
