"""Whatever a worker left behind is read without an exception."""

import json
import os
from pathlib import Path

import pytest

from agent.failure.evidence import WorkerEnd, gather, parse_error_file, pick_traceback
from agent.machine.oom_kills import OomCounters, read_counters
from agent.text.log_lines import log_lines

STACK = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\nValueError: boom'
FATAL = (
    'Fatal Python error: Aborted\n\nCurrent thread 0x7f (most recent call first):\n  File "t.py"'
)
RECORDED = {
    "message": {
        "message": "ValueError: boom",
        "extraInfo": {"py_callstack": STACK, "timestamp": "1700000000"},
    }
}


def end(**changes):
    facts = {
        "rank": 3,
        "local_rank": 3,
        "pid": 123,
        "host": "node",
        "exit_code": 1,
        "signal": None,
        "at_epoch_s": 1.7e9,
        "order": 0,
    }
    return WorkerEnd(**facts | changes)


def test_both_forms_of_torchs_error_file_are_read():
    long = parse_error_file(json.dumps(RECORDED).encode())
    assert (long.message, long.traceback, long.timestamp) == ("ValueError: boom", STACK, 1700000000)
    short = parse_error_file(b'{"message": "boom", "timestamp": 10}')
    assert (short.message, short.traceback, short.timestamp) == ("boom", None, 10)


@pytest.mark.parametrize(
    ("raw", "message", "timestamp"),
    [
        (b'{"message": "x", "timestamp": "10"}', "x", 10),
        (b'{"message": "x"}', "x", None),
        (b'{"message": "x", "timestamp": "soon"}', "x", None),
        (b'{"message": "x", "timestamp": 1e999}', "x", None),
        (b'{"message": "x", "timestamp": NaN}', "x", None),
        (b'{"message": "x", "timestamp": [1]}', "x", None),
        (b'{"message": {"message": "x"}}', "x", None),
        (b'{"message": {"message": "x", "extraInfo": 3}}', "x", None),
        (b'{"message": {"message": 3, "extraInfo": {"py_callstack": 4}}}', "", None),
        (b'{"message": {"extraInfo": {"timestamp": "7"}}}', "", 7),
        (b'{"message": "\\ud800 half a pair"}', "? half a pair", None),
    ],
)
def test_an_error_file_with_gaps_is_read_as_far_as_it_goes(raw, message, timestamp):
    error = parse_error_file(raw)
    assert (error.message, error.timestamp) == (message, timestamp)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"{}", b'{"message": 3}', b'{"message": {}}', b"\xff\xfe\x00", b"[" * 100_000, b'{"message": [' + b"[" * 99_999, b'{"message": "x", "timestamp": ' + b"9" * 5000 + b"}"],
    ids=lambda raw: repr(raw[:20]),
)  # fmt: skip
def test_a_malformed_error_file_is_named_not_raised(tmp_path, raw):
    path = tmp_path / "error.json"
    path.write_bytes(raw)
    evidence = gather(end(error_file=path))
    assert evidence.error is None
    assert evidence.error_problem is not None
    assert evidence.error_problem.startswith(f"unreadable error file {path}: ")


def test_a_huge_error_file_a_folder_and_a_pipe_are_named_not_read(tmp_path):
    huge, pipe = tmp_path / "huge", tmp_path / "pipe"
    with huge.open("wb") as file:
        file.truncate(5 << 30)
    os.mkfifo(pipe)
    for path, why in ((huge, f"{5 << 30} bytes long"), (tmp_path, "directory"), (pipe, "regular")):
        evidence = gather(end(error_file=path, log=pipe))
        assert evidence.error_problem is not None
        assert why in evidence.error_problem
        assert evidence.log_tail == ()


@pytest.mark.parametrize(
    "path", [None, Path("/nowhere/error.json"), Path("a\0b"), Path("x" * 9999)]
)
def test_a_missing_file_is_no_evidence_and_no_exception(path):
    evidence = gather(end(error_file=path, log=path))
    assert (evidence.error, evidence.traceback, evidence.message) == (None, None, None)


def test_reading_leaves_no_file_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    for path in (tmp_path, tmp_path / "none"):
        gather(end(error_file=path, log=path))
    assert os.listdir("/proc/self/fd") == before


def test_only_the_tail_of_a_long_log_is_read(tmp_path):
    log = tmp_path / "worker_3.log"
    log.write_bytes(STACK.encode() + b"\n" + b"line\n" * 40_000 + b"last \xff\n")
    evidence = gather(end(log=log))
    assert evidence.logged is None
    assert len(evidence.log_tail) == 20
    assert evidence.log_tail[-1] == "last \ufffd"


def test_the_error_file_speaks_before_the_log(tmp_path):
    error, log = tmp_path / "error.json", tmp_path / "log"
    error.write_text(json.dumps(RECORDED))
    log.write_text(STACK.replace("boom", "from the log"))
    assert gather(end(error_file=error, log=log)).message == "ValueError: boom"
    assert gather(end(log=log)).message == "ValueError: from the log"


NOISE = "\nstep" * 30


@pytest.mark.parametrize(
    ("changes", "log", "message"),
    [
        ({"exit_code": 1}, STACK, "ValueError: boom"),
        ({"exit_code": 1}, f"{STACK}\n{NOISE}", "ValueError: boom"),
        ({"exit_code": 3}, STACK, "ValueError: boom"),
        ({"exit_code": 3}, f"{STACK}\n{NOISE}", None),  # caught and logged long ago
        ({"exit_code": None, "signal": 9}, f"{STACK}\n{NOISE}", None),
        ({"exit_code": None, "signal": 11}, f"{STACK}\n\n{FATAL}", "Fatal Python error: Aborted"),
        ({"exit_code": None, "signal": 6}, f"{STACK}\n\n{FATAL}", "ValueError: boom"),
        ({"exit_code": None, "signal": 6}, FATAL, "Fatal Python error: Aborted"),
        ({"exit_code": 1, "stopped_by_us": True}, f"{STACK}\n{NOISE}", None),
    ],
)
def test_the_traceback_belongs_to_this_end(changes, log, message):
    found = pick_traceback(end(**changes), log_lines(log.encode(), cut=False))
    assert (found and found.message) == message


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


VMSTAT = {"proc/vmstat": "nr_free_pages 1\noom_kill 7\n"}


@pytest.mark.parametrize(
    ("files", "counters"),
    [
        ({}, OomCounters(None, None)),
        (VMSTAT, OomCounters(None, 7)),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "oom 5\noom_kill 2\noom_group_kill 0\n"} | VMSTAT, OomCounters(2, 7)),
        ({"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/memory.events": "oom_kill 3\n"}, OomCounters(3, None)),
        ({"proc/self/cgroup": "4:memory:/job\n0::/\n", "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 4\n"}, OomCounters(4, None)),
        ({"proc/self/cgroup": "4:cpu,memory:/host\n", "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 5\n"}, OomCounters(5, None)),
        ({"proc/self/cgroup": "4:memory:/old\n", "sys/fs/cgroup/memory/old/memory.oom_control": "under_oom 0\n"}, OomCounters(None, None)),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/unified/job/memory.events": "oom_kill 6\n"}, OomCounters(6, None)),
        ({"proc/self/cgroup": "garbage\n\n0::/../up\n", "proc/vmstat": "oom_kill many\n"}, OomCounters(None, None)),
    ],
)  # fmt: skip
def test_the_kernels_counters_are_found_in_every_layout(tmp_path, files, counters):
    assert read_counters(tree(tmp_path, files)) == counters


@pytest.mark.parametrize(
    ("start", "now", "kills"),
    [
        (OomCounters(1, 5), OomCounters(3, 9), 2),
        (OomCounters(1, 5), OomCounters(1, 9), 0),  # another container's loss
        (OomCounters(None, 5), OomCounters(None, 6), 1),
        (OomCounters(None, 5), OomCounters(3, 6), 1),
        (OomCounters(), OomCounters(3, 6), 0),
        (OomCounters(5, 5), OomCounters(3, 3), 0),
    ],
)
def test_only_our_own_cgroup_counts_where_it_tells(start, now, kills):
    assert now.kills_since(start) == kills


@pytest.mark.parametrize(
    ("start", "now", "kills"),
    [
        (OomCounters(1, 5), OomCounters(1, 6), 1),
        (OomCounters(1, 5), OomCounters(2, 6), 0),
        (OomCounters(1, 5), OomCounters(2, 8), 2),
        (OomCounters(None, 5), OomCounters(None, 6), 0),  # then the machine's counter is ours
        (OomCounters(1, None), OomCounters(1, None), 0),
        (OomCounters(5, 5), OomCounters(3, 3), 0),
    ],
)
def test_what_other_cgroups_lost_is_known_where_both_counters_are(start, now, kills):
    assert now.kills_elsewhere(start) == kills
