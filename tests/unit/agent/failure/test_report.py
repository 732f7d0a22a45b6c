"""The failure report: what people read first, what tools parse, what programs load."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from agent.failure.evidence import ErrorFile, Evidence, WorkerEnd
from agent.failure.hints import hint
from agent.failure.log_excerpt import Traceback
from agent.failure.own_end import own_end_in
from agent.failure.report import Report, as_json, ending, outer_error, render, shortened
from agent.failure.root_cause import Cause
from agent.failure.torchrun_report import block, local_time
from worker_hooks.contract.rank_lines import ENDS_ITSELF

STACK = (
    'Traceback (most recent call last):\n  File "train.py", line 8, in <module>\nValueError: boom'
)
FOUND = Traceback(STACK, "ValueError: boom", "ValueError: boom", 0)
END = WorkerEnd(3, 3, 123, "node", 1, None, 1.7e9, 1, log=Path("/logs/worker_3.log"))
KILLED = replace(END, rank=0, local_rank=0, pid=120, exit_code=None, signal=9, order=0)
ROOT = Evidence(END, logged=FOUND)
ALONE = Cause(ROOT, "it is the only rank that failed by itself")


def written(cause, script="train.py", **changes):
    return render(Report(cause, script, **changes)).split("\n")


def test_the_story_comes_before_the_block():
    cause = replace(ALONE, stopped=(0, 1, 2, 4, 5, 6, 7))
    when = local_time(1.7e9)
    assert written(cause, hint="look here") == [
        "msrun: rank 3 on node (pid 123, attempt 0) exited with code 1",
        "  hint: look here",
        "Traceback (most recent call last):",
        '  File "train.py", line 8, in <module>',
        "ValueError: boom",
        "  log: /logs/worker_3.log",
        "msrun stopped ranks 0-2,4-7",
        "",
        "=" * 33,
        "train.py FAILED",
        "-" * 33,
        "Failures:",
        "  <NO_OTHER_FAILURES>",
        "-" * 33,
        "Root Cause (first observed failure):",
        "[0]:",
        f"  time      : {when}",
        "  host      : node",
        "  rank      : 3 (local_rank: 3)",
        "  exitcode  : 1 (pid: 123) ",
        "  error_file: <N/A>",
        "  traceback : ValueError: boom",
        "=" * 33,
    ]


def test_a_hung_rank_is_told_by_why_it_was_killed():
    hung = replace(KILLED, hung="made no progress for 2 s in forward of step 7")
    told = "made no progress for 2 s in forward of step 7; msrun killed it"
    assert ending(hung) == told
    words = hint(Evidence(hung, oom_kills=1), "python")
    assert words is not None
    assert "each rank's stack at that time is in its log, below the words 'is inspected'" in words


def test_a_hung_rank_that_another_signal_ended_is_told_so_too():
    for end in (replace(KILLED, signal=15), replace(KILLED, signal=None, exit_code=1)):
        assert ending(replace(end, hung="made no progress")) == "made no progress; msrun ended it"


@pytest.mark.parametrize("signal", [9, 15])
def test_a_signal_that_msrun_sent_is_nobody_elses(signal):
    found = Evidence(replace(KILLED, signal=signal, ended_for="rank 0 did not even answer"))
    sent = "msrun sent the signal: rank 0 did not even answer"
    assert hint(found, "python") == sent
    assert hint(replace(found, oom_kills=1), "python") == sent
    error = ErrorFile("ValueError: boom")  # it had failed before; the cause of that is not known
    assert hint(replace(found, error=error), "python") == sent
    error = ErrorFile("RuntimeError: unhandled system error")
    assert "NCCL_DEBUG" in (hint(replace(found, error=error), "python") or "")
    told = as_json(Report(Cause(found, ""), "t.py"))["root"]
    assert told["ended_by_msrun"] == "rank 0 did not even answer"
    assert as_json(Report(ALONE, "t.py"))["root"]["ended_by_msrun"] is None


def test_who_ended_itself_is_told_why():
    last = f"msrun: {ENDS_ITSELF}its device reports an error: CUDA error: ECC"
    words = hint(Evidence(KILLED, log_tail=("step 1", last)), "python")
    assert words is not None
    assert words.endswith("where it could not: its device reports an error: CUDA error: ECC")
    for end, tail in ((KILLED, (last, "step 2")), (replace(KILLED, signal=15), (last,))):
        assert "ended itself" not in (hint(Evidence(end, log_tail=tail), "python") or "")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"step 1\nmsrun: this rank ends itself: its device failed\n", "its device failed"),
        (b"x" * 9000 + b"\nmsrun: this rank ends itself: a \xff\n", "a \ufffd"),
        (b"msrun: this rank ends itself: earlier\nstep 1\n", ""),  # another's, in the same file
        (b"this rank ends itself: " + b"a" * 999, "a" * 300),
        (b"\n", ""),
        (b"", ""),
    ],
)
def test_the_end_of_a_killed_ranks_log_says_whether_it_did_that_itself(tmp_path, content, why):
    log = tmp_path / "worker_0.log"
    log.write_bytes(content)
    assert own_end_in(str(log)) == why


def test_where_there_is_no_log_nothing_is_known(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for log in ("", str(tmp_path / "none"), str(tmp_path), str(tmp_path / "pipe")):
        assert own_end_in(log) == ""


def test_a_killed_rank_is_told_by_its_last_lines():
    cause = Cause(Evidence(KILLED, log_tail=("step 1", "step 2\x1b[2J")), "")
    assert written(cause)[:5] == [
        "msrun: rank 0 on node (pid 120, attempt 0) was killed by SIGKILL",
        "  last lines of its log:",
        "  | step 1",
        "  | step 2\\x1b[2J",
        "  log: /logs/worker_3.log",
    ]


def test_consequences_are_one_line():
    lost = tuple(Evidence(replace(KILLED, rank=rank)) for rank in (5, 4))
    cause = Cause(ROOT, "why", lost, (Evidence(replace(KILLED, rank=7)),), (6,))
    lines = written(cause)
    assert "  chosen as root cause: why" in lines
    assert "msrun stopped rank 6; ranks 4-5 failed in consequence; rank 7 failed as well" in lines


def test_what_all_ranks_raised_is_shown_once():
    same = tuple(replace(ROOT, end=replace(END, rank=rank, order=9 + rank)) for rank in (0, 1, 2))
    lines = written(Cause(ROOT, "why", (), same))
    assert "ranks 0-2 raised the same" in lines
    assert not [line for line in lines if "chosen as root cause" in line]
    assert lines[lines.index("Failures:") + 1] == "  ranks 0-2 raised the same"
    assert [line for line in lines if line.startswith("[")] == ["[0]:"]


def test_other_failures_beside_the_same_are_told():
    other = Evidence(replace(KILLED, rank=7))
    quiet = Evidence(replace(END, rank=5, order=4))
    same = replace(ROOT, end=replace(END, rank=1, order=5))
    lines = written(Cause(ROOT, "why", (), (other, quiet, same)))
    assert "  chosen as root cause: why" in lines
    assert "rank 1 raised the same; ranks 5,7 failed as well" in lines
    assert [line for line in lines if line.startswith("[")] == ["[0]:", "[2]:", "[1]:"]


@pytest.mark.parametrize(
    ("code", "signal", "words"),
    [
        (1, None, "exited with code 1"),
        (255, None, "exited with code 255"),
        (None, 9, "was killed by SIGKILL"),
        (None, 40, "was killed by signal 40"),
        (None, None, "is gone; how it ended is not known"),
    ],
)
def test_an_end_is_said_in_words(code, signal, words):
    assert ending(replace(END, exit_code=code, signal=signal)) == words


def test_the_block_lists_failures_in_order_of_detection_without_the_root():
    cause = Cause(ROOT, "", (Evidence(KILLED),), (), (1, 2))
    lines = block(cause, "t.py").split("\n")
    assert [line for line in lines if line.startswith("[")] == ["[0]:", "[1]:"]
    assert lines.index("Failures:") + 1 == lines.index("[0]:")
    assert "  exitcode  : -9 (pid: 120)  (SIGKILL)" in lines
    assert "  traceback : Signal 9 (SIGKILL) received by PID 120" in lines
    assert lines[-1] == "=" * 52


def test_a_multi_line_error_is_indented_in_the_block():
    content = {"message": {"message": "x", "extraInfo": {"py_callstack": STACK}}}
    error = ErrorFile("x", STACK, 10, content)
    end = replace(END, error_file=Path("/e.json"))
    text = block(Cause(Evidence(end, error=error), ""), "t.py")
    assert (
        '  error_file: /e.json\n  traceback : Traceback (most recent call last):\n    File "train'
        in text
    )
    assert f"  time      : {local_time(10)}\n" in text


@pytest.mark.parametrize("epoch_s", [10**30, -(10**30)])
def test_a_time_no_calendar_knows_is_not_available(epoch_s):
    assert local_time(epoch_s) == "<N/A>"


def test_an_unreadable_error_file_is_named_in_both_parts():
    end = replace(END, error_file=Path("/e\x1b.json"))
    lines = written(
        Cause(Evidence(end, error_problem="unreadable error file /e\x1b.json: not JSON"), "")
    )
    assert "  unreadable error file /e\\x1b.json: not JSON" in lines
    assert "  error_file: /e\\x1b.json" in lines


def test_nothing_a_worker_prints_reaches_the_terminal_raw():
    evil = "\x1b]0;x\x07\x9b2J\r\x00"
    end = replace(END, host=f"h{evil}", log=Path(f"/l{evil}"), error_file=Path(f"/e{evil}"))
    error = ErrorFile(evil, f"{STACK}{evil}", 10, {"message": {"message": evil, "extraInfo": {}}})
    for evidence in (
        Evidence(end, error=error),
        Evidence(end, log_tail=(evil,), error_problem=evil),
    ):
        text = render(Report(Cause(evidence, ""), f"s{evil}", hint=evil))
        assert not [char for char in text if ord(char) < 32 and char != "\n"]
        assert "\x9b" not in text


def test_a_long_traceback_is_shortened_in_the_middle():
    lines = shortened([f"line {number}" for number in range(1000)] + ["x" * 9999])
    assert len(lines) == 101
    assert lines[20] == "  ... 901 lines left out ..."
    assert lines[-2:] == ["line 999", "x" * 500 + "..."]


def test_the_report_for_programs_is_plain_json():
    cause = Cause(ROOT, "why", (Evidence(KILLED),), (), (1, 2))
    ids = {"run_id": "none", "record_id": "abc"}
    report = json.loads(json.dumps(as_json(Report(cause, "train.py", "do this", ids))))
    assert report["run_id"] == "none"
    assert report["script"] == "train.py"
    assert report["stopped_ranks"] == [1, 2]
    assert report["consequences"][0]["signal_name"] == "SIGKILL"
    assert report["root"] == {
        "rank": 3, "local_rank": 3, "host": "node", "pid": 123, "attempt": 0,
        "exit_code": 1, "signal": None, "signal_name": None, "time": "2023-11-14T22:13:20+00:00",
        "message": "ValueError: boom", "traceback": STACK,
        "log": "/logs/worker_3.log", "log_tail": [], "error_file": None, "error_file_problem": None,
        "ended_by_msrun": None, "hint": "do this", "reason": "why",
    }  # fmt: skip


def test_an_outer_error_file_gets_the_roots_error_and_code():
    content = {
        "message": {"message": "x", "extraInfo": {"timestamp": "10"}, "more": 1},
        "kept": True,
    }
    killed = Evidence(KILLED, error=ErrorFile("x", None, 10, content))
    assert outer_error(Cause(killed, "")) == {
        "message": {"message": "x", "extraInfo": {"timestamp": "10"}, "more": 1, "errorCode": -9},
        "kept": True,
    }
    short = Evidence(END, error=ErrorFile("x", None, 10, {"message": "x", "timestamp": 10}))
    assert outer_error(Cause(short, "")) == {"message": "x", "timestamp": 10}


def test_an_outer_error_file_is_filled_from_the_log_when_there_is_no_inner_one():
    extra = {"py_callstack": STACK, "timestamp": "1700000000"}
    assert outer_error(ALONE) == {
        "message": {"message": "ValueError: boom", "extraInfo": extra, "errorCode": 1}
    }
    said = outer_error(Cause(Evidence(KILLED), ""))["message"]["message"]
    assert said == "rank 0 on node (pid 120, attempt 0) was killed by SIGKILL"
