"""What a run leaves in its folder: logs, torchrun's tree, events, the failure for programs."""

from __future__ import annotations

import json
import os
import re
import socket

import pytest
from support.jobs import WORKERS

WRITE = WORKERS / "write.py"
FAILS = WORKERS / "fails_at.py"


def names(folder):
    return {path.name for path in folder.iterdir()}


def tree(msrun):
    """torchrun's tree: path below the run's folder -> content."""
    (top,) = [
        path
        for path in (msrun.tmp / "logs").iterdir()
        if path.is_dir() and path.name not in {"errors", "earlier"}
    ]
    return {
        str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()
    }


# --- MindSpore's layout --------------------------------------------------------------------------


def test_each_rank_has_one_log_with_both_streams_in_order(msrun):
    ended = msrun.run("--worker_num=11", WRITE, r"out RANK\n", r"err RANK\n")
    assert ended.code == 0
    logs = msrun.tmp / "logs"
    assert names(logs) == {f"worker_{rank}.log" for rank in range(11)} | {
        "scheduler.log",
        "events.jsonl",
        "status.json",
        "errors",
        ".msrun.lock",
    }
    for rank in range(11):
        assert (logs / f"worker_{rank}.log").read_text() == f"out {rank}\nerr {rank}\n"


def test_bytes_that_are_no_text_reach_the_log_as_they_are(msrun):
    ended = msrun.run("--worker_num=2", WRITE, r"\xff\x00\xfe\r\n\x80", "")
    assert ended.code == 0
    for rank in range(2):
        assert (msrun.tmp / f"logs/worker_{rank}.log").read_bytes() == b"\xff\x00\xfe\r\n\x80"


def test_a_report_about_bytes_that_are_no_text_is_harmless(msrun, tmp_path):
    (tmp_path / "bytes.py").write_text(
        r"import os; os.write(2, b'\xff\x1b[2J\x07bell\n'); os._exit(3)"
    )
    ended = msrun.run("--worker_num=2", "bytes.py")
    assert ended.code == 1
    assert "bell" in ended.err
    assert "\x1b" not in ended.err
    assert "\x07" not in ended.err
    json.loads((tmp_path / "logs/failure.json").read_bytes())


def test_the_logs_stem_may_name_host_and_address(msrun):
    ended = msrun.run("--worker_log_name=w-{hostname}-{ip}", WRITE, "x", "")
    assert ended.code == 0
    (log,) = (msrun.tmp / "logs").glob("w-*_0.log")
    name = re.fullmatch(rf"w-{re.escape(socket.gethostname())}-(.+)_0\.log", log.name)
    assert socket.inet_aton(name[1])


def test_a_restart_keeps_the_logs_of_earlier_attempts(msrun):
    ended = msrun.run("--worker_num=2", "--max-restarts=2", FAILS, 1)
    assert ended.code == 1
    logs = msrun.tmp / "logs"
    for attempt in ("", ".attempt_0", ".attempt_1"):
        assert (logs / f"worker_0{attempt}.log").read_text() == "0 begins\n"
        assert "rank 1 had enough" in (logs / f"worker_1{attempt}.log").read_text()
    assert ended.out.count("begins") == 6


def test_a_second_run_in_the_same_folder_sets_the_first_aside(msrun):
    logs = msrun.tmp / "logs"
    assert msrun.run("--worker_num=3", FAILS, 0).code == 1
    first = json.loads((logs / "status.json").read_bytes())["record_id"]
    before = {name: (logs / name).read_bytes() for name in names(logs) if (logs / name).is_file()}
    assert msrun.run("--worker_num=2", WRITE, "second", "").code == 0
    assert names(logs) == {
        "worker_0.log",
        "worker_1.log",
        "scheduler.log",
        "events.jsonl",
        "status.json",
        "errors",
        ".msrun.lock",
        "earlier",
    }
    assert (logs / "worker_0.log").read_text() == "second"
    aside = logs / "earlier" / first
    del before[".msrun.lock"]
    assert {name: (aside / name).read_bytes() for name in before} == before
    assert "failure.json" in before
    assert msrun.run("--worker_num=2", WRITE, "third", "").code == 0
    assert len(names(logs / "earlier")) == 2


def test_without_a_log_dir_the_run_is_in_the_state_folder(msrun, script_of):
    ended = msrun.run("--log_dir=", script_of("print('here')"))
    assert (ended.code, ended.out) == (0, "here\n")
    (run,) = (msrun.tmp / "state/msrun/runs").iterdir()
    assert names(run) >= {
        "record.json",
        "worker_0.log",
        "scheduler.log",
        "events.jsonl",
        "status.json",
    }
    assert json.loads((run / "record.json").read_bytes())["log_dir"] == str(run)


def test_dev_null_writes_no_file(msrun, script_of):
    ended = msrun.run(
        "--log_dir=/dev/null",
        "--nproc-per-node=2",
        "-t",
        "0:3",
        script_of(
            "import os; os.write(1, repr(os.environ['TORCHELASTIC_ERROR_FILE']).encode() + b'\\n')"
        ),
    )
    assert (ended.code, ended.out) == (0, "''\n''\n")
    assert not (msrun.tmp / "logs").exists()
    (run,) = (msrun.tmp / "state/msrun/runs").iterdir()
    assert not list(run.glob("*.log"))


@pytest.fixture
def script_of(tmp_path):
    def make(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return make


# --- torchrun's tree -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, files",
    [
        (["-r", "0:3,1:3"], {"attempt_0/0/stdout.log": "out 0\n", "attempt_0/0/stderr.log": "err 0\n", "attempt_0/1/stdout.log": "out 1\n", "attempt_0/1/stderr.log": "err 1\n"}),
        (["-t", "0:3,1:3"], {"attempt_0/0/stdout.log": "out 0\n", "attempt_0/0/stderr.log": "err 0\n", "attempt_0/1/stdout.log": "out 1\n", "attempt_0/1/stderr.log": "err 1\n"}),
        (["-r", "1:1", "-t", "0:2"], {"attempt_0/0/stderr.log": "err 0\n", "attempt_0/1/stdout.log": "out 1\n"}),
        (["-t", "0:1,1:1", "--duplicate-stdout-filters=t 1"], {"attempt_0/0/stdout.log": "out 0\n", "attempt_0/1/stdout.log": "out 1\n", "attempt_0/filtered_stdout.log": "[default1]:out 1\n"}),
        (["-t", "0:3,1:3", "--duplicate-stdout-filters=nothing", "--duplicate-stderr-filters=err 0,xyz"], {"attempt_0/0/stdout.log": "out 0\n", "attempt_0/0/stderr.log": "err 0\n", "attempt_0/1/stdout.log": "out 1\n", "attempt_0/1/stderr.log": "err 1\n", "attempt_0/filtered_stdout.log": "", "attempt_0/filtered_stderr.log": "[default0]:err 0\n"}),
        (["-r", "0:1,1:1", "--duplicate-stdout-filters=out"], {"attempt_0/0/stdout.log": "out 0\n", "attempt_0/1/stdout.log": "out 1\n", "attempt_0/filtered_stdout.log": ""}),
    ],
)  # fmt: skip
def test_torchruns_tree(msrun, args, files):
    ended = msrun.run(
        "--nproc-per-node=2", "--rdzv-id=job7", *args, WRITE, r"out RANK\n", r"err RANK\n"
    )
    assert ended.code == 0
    assert tree(msrun) == files
    (top,) = (msrun.tmp / "logs").glob("job7_*")
    assert top.is_dir()


def test_maps_name_ranks_above_nine(msrun):
    ended = msrun.run("--nproc-per-node=12", "-r", "10:3,11:1", WRITE, r"out RANK\n", r"err RANK\n")
    assert ended.code == 0
    assert tree(msrun) == {
        "attempt_0/10/stdout.log": "out 10\n",
        "attempt_0/10/stderr.log": "err 10\n",
        "attempt_0/11/stdout.log": "out 11\n",
    }


def test_torchruns_tree_has_a_folder_for_each_attempt_and_the_error_files(msrun):
    ended = msrun.run(
        "--nproc-per-node=2",
        "--max-restarts=1",
        "-t",
        "0:3,1:3",
        WORKERS / "junk_error.py",
        '{"message": "told"}',
        1,
    )
    assert ended.code == 1
    assert "told" in ended.err
    found = tree(msrun)
    for attempt in range(2):
        assert found[f"attempt_{attempt}/1/error.json"] == '{"message": "told"}'
        assert "what the log says" in found[f"attempt_{attempt}/1/stderr.log"]


# --- events and failure --------------------------------------------------------------------------


def test_events_are_json_lines_and_every_decision_has_its_reason(msrun):
    msrun.run("--worker_num=2", "--max-restarts=1", FAILS, 1)
    lines = (msrun.tmp / "logs/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert all(isinstance(event["time"], float) for event in events)
    decided = [
        event
        for event in events
        if event["event"] in {"StartAttempt", "SignalRanks", "Sweep", "Finish"}
    ]
    assert len(decided) >= 6
    assert all(event["reason"] for event in decided)
    assert "restart 1 of 1: rank 1 exited with code 1" in {event["reason"] for event in decided}
    assert all(
        re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} ", line)
        for line in (msrun.tmp / "logs/scheduler.log").read_text().splitlines()
    )


def test_the_report_has_root_cause_consequences_and_torchruns_block_in_this_order(msrun):
    ended = msrun.run("--worker_num=4", FAILS, 2)
    assert ended.code == 1
    told = ended.err.splitlines()
    assert re.fullmatch(r"msrun: rank 2 on \S+ \(pid \d+, attempt 0\) exited with code 1", told[0])
    places = [
        next(i for i, line in enumerate(told) if text in line)
        for text in (
            "Traceback (most recent call last)",
            "RuntimeError: rank 2 had enough",
            "  log: ",
            "msrun stopped ranks 0-1,3",
            "fails_at.py FAILED",
            "Root Cause (first observed failure):",
        )
    ]
    assert places == sorted(places)
    assert set(told[-1]) == {"="}
    assert sum("stopped" in line for line in told) == 1


def test_failure_json_tells_programs_the_same(msrun):
    msrun.run("--worker_num=4", FAILS, 2)
    failure = json.loads((msrun.tmp / "logs/failure.json").read_bytes())
    root = failure["root"]
    assert (root["rank"], root["exit_code"], root["signal"], root["attempt"]) == (2, 1, None, 0)
    assert root["message"] == "RuntimeError: rank 2 had enough"
    assert root["traceback"].startswith("Traceback (most recent call last)")
    assert root["log"].endswith("logs/worker_2.log")
    assert failure["stopped_ranks"] == [0, 1, 3]
    assert failure["consequences"] == failure["other_failures"] == []


def test_a_known_cause_has_its_hint_in_both_reports(msrun, script_of):
    ended = msrun.run(
        "--worker_num=2",
        script_of(
            "import os, signal\nif os.environ['RANK'] == '0': import no_such_module\nsignal.pause()"
        ),
    )
    hint = json.loads((msrun.tmp / "logs/failure.json").read_bytes())["root"]["hint"]
    assert "no_such_module" in hint
    assert f"hint: {hint}" in ended.err


def test_a_run_without_failure_leaves_no_failure_json(msrun):
    assert msrun.run(WRITE, "", "").code == 0
    assert not (msrun.tmp / "logs/failure.json").exists()


@pytest.mark.parametrize(
    "kind",
    ["", r"\xff\xfe\x00", "[]", '{"message": {"message": {"a": 1}}}',
     '{"message": {"message": "x", "extraInfo": {"py_callstack": 3, "timestamp": "never"}}}',
     '{"message": "\\\\ud800 half a pair \\\\u001b[2J"}', "folder", "pipe", "loop", "device", "huge"],
)  # fmt: skip
def test_whatever_stands_in_an_error_file_the_report_is_written(msrun, kind):
    outer = msrun.tmp / "outer.json"
    ended = msrun.run(
        "--worker_num=2", WORKERS / "junk_error.py", kind, 1, TORCHELASTIC_ERROR_FILE=str(outer)
    )
    assert ended.code == 1
    assert "rank 1 on" in ended.err
    assert "Root Cause (first observed failure)" in ended.err
    assert "\x1b" not in ended.err
    failure = json.loads((msrun.tmp / "logs/failure.json").read_bytes())
    assert failure["root"]["rank"] == 1
    json.loads(outer.read_bytes())
    if not kind.startswith("{"):
        assert "unreadable error file" in ended.err
        assert "ValueError: what the log says" in ended.err


def test_msruns_own_error_file_is_filled_from_the_log_as_under_record(msrun):
    outer = msrun.tmp / "outer.json"
    msrun.run("--worker_num=2", FAILS, 1, TORCHELASTIC_ERROR_FILE=str(outer))
    message = json.loads(outer.read_bytes())["message"]
    assert message["message"] == "RuntimeError: rank 1 had enough"
    assert "Traceback (most recent call last)" in message["extraInfo"]["py_callstack"]
    assert message["errorCode"] == 1
    assert int(message["extraInfo"]["timestamp"]) > 0


def test_msruns_own_error_file_that_cannot_be_written_is_no_trouble(msrun):
    ended = msrun.run(
        "--worker_num=2", FAILS, 1, TORCHELASTIC_ERROR_FILE="/dev/null/nowhere/error.json"
    )
    assert ended.code == 1
    assert "RuntimeError: rank 1 had enough" in ended.err


def test_a_killed_rank_is_named_with_its_last_lines(msrun, script_of):
    ended = msrun.run(
        "--worker_num=2",
        script_of(
            "import os, signal\nprint('last', 'words', flush=True)\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\nsignal.pause()"
        ),
    )
    assert ended.code == 1
    assert re.search(
        r"msrun: rank 1 on \S+ \(pid \d+, attempt 0\) was killed by SIGKILL", ended.err
    )
    assert "  | last words" in ended.err
    assert (
        json.loads((msrun.tmp / "logs/failure.json").read_bytes())["root"]["signal_name"]
        == "SIGKILL"
    )
    assert os.listdir(msrun.tmp / "logs/errors/attempt_0") == []
