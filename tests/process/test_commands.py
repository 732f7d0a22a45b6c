from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import DEADLINE_S, WORKERS, Ended, Job, Launcher, poll

SPEAK = WORKERS / "speak_and_wait.py"
DEAF = WORKERS / "deaf_and_waiting.py"


def spoken(job: Job, text: str) -> Job:
    """The job, once both of its ranks have said ``text``; in whatever file."""

    def has_spoken() -> bool:
        assert job.process.poll() is None, job.wait()
        said = sum(path.read_text().count(text) for path in job.folder.rglob("*.log"))
        return said >= 2 and job.status()["state"] == "running"

    poll(has_spoken)
    return job


def speaking(launcher: Launcher, *options: object, log_dir: Path | None = None) -> Job:
    """Two ranks that have spoken and wait for ``go``."""
    job = launcher.start("--worker_num=2", *options, SPEAK, launcher.tmp / "go", log_dir=log_dir)
    return spoken(job, "trouble in")


def go(launcher: Launcher) -> None:
    (launcher.tmp / "go").touch()


def is_one_sentence(ended: Ended) -> bool:
    return ended.code == 2 and ended.err.startswith("msrun: error: ") and ended.err.count("\n") == 1


# --- status ------------------------------------------------------------------------------------


def test_status_shows_the_run_and_a_plain_line_for_each_rank(msrun):
    job = speaking(msrun, "--max_restarts=3")
    shown = msrun.command("status")
    assert shown.code == 0 and not shown.err
    assert shown.out.isascii() and "\x1b" not in shown.out
    lines = [line.split() for line in shown.out.splitlines()]
    assert ["state", "running"] in lines
    assert ["attempt", "0,", "0", "of", "3", "restarts,", "0", "replaced"] in lines
    assert ["logs", str(job.folder)] in lines
    assert ["rank", "pid", "state", "attempt", "uptime", "exit"] in lines
    for rank, pid in job.pids().items():
        assert [str(rank), str(pid), "running", "0"] in [line[:4] for line in lines]


def test_status_of_an_ended_run_names_exit_and_reason(msrun):
    go(msrun)
    assert msrun.run("--worker_num=2", SPEAK, msrun.tmp / "go", "fail-first").code == 1
    shown = msrun.command("status")
    assert shown.code == 0
    assert "exited with code 3" in shown.out and "reason   rank 0" in shown.out


def test_status_never_says_running_of_a_run_whose_msrun_was_killed(msrun):
    job = speaking(msrun)
    os.kill(job.pid, signal.SIGKILL)
    zombie = poll(lambda: (out := msrun.command("status").out) and "lost" in out and out)
    job.process.wait()
    reaped = msrun.command("status").out
    for shown in (zombie, reaped):
        assert f"lost: msrun (pid {job.pid}) is gone" in shown
        assert " running" not in shown


def test_status_all_lists_every_run_newest_first_and_json_tells_the_same(msrun):
    go(msrun)
    first = msrun.start("--worker_num=1", SPEAK, log_dir=msrun.tmp / "one")
    assert first.wait().code == 0
    second = msrun.start("--worker_num=2", SPEAK, log_dir=msrun.tmp / "two")
    assert second.wait().code == 0
    rows = msrun.command("status", "--all").out.splitlines()[1:]
    ids = [second.status()["record_id"], first.status()["record_id"]]
    assert [row.split()[0] for row in rows] == ids
    assert rows[0].split()[1:4] == ["succeeded", str(second.pid), "2"]
    assert str(SPEAK) in rows[0] and rows[0].endswith(str(second.folder))
    told = json.loads(msrun.command("status", "--all", "--json").out)
    assert [(one["record_id"], one["state"], one["alive"]) for one in told] == [
        (name, "succeeded", False) for name in ids
    ]
    one = json.loads(msrun.command("status", ids[1], "--json").out)
    assert one["status"]["workers"][0]["exit"] == "exited with code 0"


def test_status_is_whole_in_a_narrow_pipe_and_on_a_terminal_without_unicode(msrun):
    folder = msrun.tmp / ("ä" + "x" * 150)
    speaking(msrun, log_dir=folder)
    piped = msrun.command("status", "--all", COLUMNS="40")
    assert str(folder) in piped.out
    ascii_only = msrun.command("status", "--all", PYTHONIOENCODING="ascii")
    assert ascii_only.code == 0 and "x" * 150 in ascii_only.out and "\\xe4" in ascii_only.out


# --- stop --------------------------------------------------------------------------------------


def test_stop_ends_a_run_and_says_so_and_says_so_again(msrun):
    job = speaking(msrun)
    stopped = msrun.command("stop")
    assert (
        stopped.code == 0 and stopped.out.startswith("stopping run ") and ": stopped" in stopped.out
    )
    assert job.wait().code in {0, 143}
    again = msrun.command("stop", job.status()["record_id"])
    assert again.code == 0 and "had already ended: stopped" in again.out


def test_stop_that_takes_too_long_fails_and_now_kills(msrun):
    job = spoken(msrun.start("--worker_num=2", DEAF), "deaf\n")
    late = msrun.command("stop", "--timeout", "0.3")
    assert late.code == 1 and "has not ended within" in late.out
    assert "rank 1 (pid" in late.out and "msrun stop --now" in late.out
    patient = msrun.command("stop", "--timeout", "0.3")
    assert patient.code == 1 and "still stopping run " in patient.out
    assert job.status()["state"] == "stopping", "a repeated stop must not kill"
    assert msrun.command("stop", "--now").code == 0
    job.wait()


def test_stop_now_alone_needs_one_signal(msrun):
    job = spoken(msrun.start("--worker_num=2", DEAF), "deaf\n")
    assert msrun.command("stop", "--now").code == 0
    job.wait()
    (asked,) = [event for event in job.events() if event["event"] == "StopRequested"]
    assert (asked["is_now"], asked["why"]) == (True, "msrun stop --now")


def test_stop_does_not_guess_between_living_runs(msrun):
    one = speaking(msrun, log_dir=msrun.tmp / "one")
    speaking(msrun, log_dir=msrun.tmp / "two")
    refused = msrun.command("stop")
    assert is_one_sentence(refused) and "2 runs are alive" in refused.err
    assert msrun.command("stop", one.status()["record_id"]).code == 0


# --- logs --------------------------------------------------------------------------------------


def test_logs_are_ordered_by_rank_and_prefixed_and_one_rank_is_as_it_is(msrun):
    speaking(msrun)
    everything = msrun.command("logs").out.splitlines()
    assert everything[0] == "[rank 0]: hello from 0 in attempt 0"
    assert everything[2] == "[rank 1]: hello from 1 in attempt 0"
    one = msrun.command("logs", "--rank", 1).out
    assert one == "hello from 1 in attempt 0\ntrouble in 1\n"
    assert "StartAttempt" in msrun.command("logs", "--scheduler").out


def test_logs_of_torchrun_s_tree_hold_both_streams(msrun):
    speaking(msrun, "-r", "0:1,1:3")
    assert sorted(msrun.command("logs", "--rank", 0).out.splitlines()) == [
        "hello from 0 in attempt 0",
        "trouble in 0",
    ]
    assert msrun.command("logs", "--rank", 1).out == "hello from 1 in attempt 0\ntrouble in 1\n"


@pytest.mark.parametrize("tree", [(), ("-t", "3")])
def test_logs_of_an_earlier_attempt_are_kept(msrun, tree):
    go(msrun)
    job = msrun.start(
        "--worker_num=2", "--max_restarts=1", *tree, SPEAK, msrun.tmp / "go", "fail-first"
    )
    assert job.wait().code == 0
    assert "attempt 1" in msrun.command("logs", "--rank", 0).out
    first = msrun.command("logs", "--rank", 0, "--attempt", 0).out
    assert "hello from 0 in attempt 0" in first and "attempt 1" not in first
    refused = msrun.command("logs", "--attempt", 2)
    assert is_one_sentence(refused) and "attempts 0 to 1" in refused.err


def test_logs_of_a_run_whose_folder_was_used_again_are_found_aside(msrun):
    go(msrun)
    first = msrun.start("--worker_num=1", SPEAK, msrun.tmp / "go")
    first.wait()
    name = first.status()["record_id"]
    assert msrun.run("--worker_num=2", SPEAK, msrun.tmp / "go").code == 0
    assert msrun.command("logs", name).out.startswith("[rank 0]: hello from 0")
    assert "rank 1" not in msrun.command("logs", name).out
    assert "succeeded" in msrun.command("status", name).out


def test_logs_that_vanished_are_one_sentence(msrun):
    go(msrun)
    job = msrun.start("--worker_num=1", SPEAK, msrun.tmp / "go")
    job.wait()
    shutil.rmtree(job.folder)
    gone = msrun.command("logs")
    assert is_one_sentence(gone) and "is gone" in gone.err
    assert msrun.command("status").code == 0


def following(launcher: Launcher, *args: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "msrun", "logs", "-f", *args],
        env=launcher.env(),
        cwd=launcher.tmp,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_logs_follow_shows_lines_as_they_come_through_a_restart_and_ends_with_the_run(msrun):
    job = speaking(msrun, "--max_restarts=1")
    with following(msrun, "--rank", "0") as follower:
        assert follower.stdout.readline() == b"hello from 0 in attempt 0\n"
        os.kill(job.pids()[0], signal.SIGKILL)
        lines = [follower.stdout.readline(), follower.stdout.readline()]
        assert b"hello from 0 in attempt 1\n" in lines
        go(msrun)
        rest, err = follower.communicate(timeout=DEADLINE_S)
        assert rest.endswith(b"bye from 0 in attempt 1\n") and not err
        assert follower.returncode == 0
    assert job.wait().code == 0
    ended = msrun.command("logs", "-f", "--rank", 0)
    assert ended.code == 0 and "bye from 0" in ended.out


def test_logs_follow_leaves_on_ctrl_c_with_130_and_no_traceback(msrun):
    speaking(msrun)
    with following(msrun) as follower:
        follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        _, err = follower.communicate(timeout=DEADLINE_S)
        assert follower.returncode == 130 and b"Traceback" not in err


def test_logs_follow_leaves_when_nobody_reads(msrun):
    speaking(msrun)
    with following(msrun) as follower:
        follower.stdout.readline()
        follower.stdout.close()
        assert follower.wait(timeout=DEADLINE_S) == 0
        assert follower.stderr.read() == b""


@pytest.mark.parametrize("args", [("status",), ("logs",), ("--dry_run", SPEAK)])
@pytest.mark.parametrize("closed", [False, True])
def test_a_reader_that_left_is_no_error(msrun, args, closed):
    speaking(msrun)
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "msrun", *map(str, args)]
    if closed:
        words = ["sh", "-c", 'exec "$@" >&-', "sh", *words]
    done = subprocess.run(
        words,
        env=msrun.env(),
        cwd=msrun.tmp,
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


# --- wrong usage and dry run -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("status",), "no run is recorded"),
        (("stop", "nosuch"), "no run"),
        (("status", "--foo"), "--foo"),
        (("logs", "a", "b"), "argument"),
        (("logs", "--rank", "x"), "--rank"),
        (("logs", "--rank=-1"), "--rank"),
        (("logs", "--scheduler", "--rank=1"), "--scheduler"),
        (("stop", "--timeout=-1"), "--timeout"),
        (("status", "--all", "x"), "--all"),
    ],
)
def test_wrong_usage_is_one_sentence_and_2(msrun, args, word):
    refused = msrun.command(*args)
    assert is_one_sentence(refused), refused
    assert word in refused.err


@pytest.mark.parametrize("command", ["status", "stop", "logs"])
def test_subcommands_explain_themselves(msrun, command):
    shown = msrun.command(command, "--help")
    assert shown.code == 0 and shown.out.startswith(f"Usage: msrun {command}")


def test_a_dry_run_starts_makes_and_binds_nothing(msrun, tmp_path):
    shown = msrun.command("--worker_num=2", "--dry_run", f"--log_dir={tmp_path}/logs", SPEAK)
    assert shown.code == 0 and "# rank 1" in shown.out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_s_rank_can_be_pasted_into_a_shell(msrun):
    shown = msrun.command(
        "--worker_num=2",
        "--sim_level=1",
        "--sim_rank_id=1",
        "--master_port=12345",
        SPEAK,
        "a b",
    )
    pasted = subprocess.run(
        ["sh"],
        input=shown.out.replace("'a b'", ""),
        env=msrun.env(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert pasted.stdout.startswith("hello from 1 in attempt 0\n")
