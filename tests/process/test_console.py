"""What the console shows: whole lines, all of them, whoever reads or does not."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import zlib

import pytest
from support.jobs import DEADLINE_S, WORKERS, Job, poll

WRITE = WORKERS / "write.py"
CHATTER = WORKERS / "chatter.py"
PIPE_BYTES = 4096


def start(msrun, *args, out=subprocess.PIPE, err=subprocess.PIPE, **environ):
    """`msrun ARGS` with these streams."""
    folder = msrun.tmp / "logs"
    process = subprocess.Popen(
        [sys.executable, "-m", "msrun", f"--log_dir={folder}", *map(str, args)],
        env=msrun.env(**environ),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        cwd=msrun.tmp,
        start_new_session=True,
    )
    job = Job(process, folder, msrun.mark)
    msrun.jobs.append(job)
    return job


@pytest.fixture
def small_pipe():
    """A pipe that is soon full: (read end, write end)."""
    ends = list(os.pipe())
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield ends
    for end in filter(None, ends):
        os.close(end)


def read_to_end(fd):
    return b"".join(iter(lambda: os.read(fd, 1 << 16), b""))


def by_rank(out):
    """rank -> its lines without their prefix; fails on a line without one."""
    lines: dict[int, list[str]] = {}
    for line in out.splitlines():
        found = re.match(r"\[rank (\d+)\]: (.*)$", line)
        assert found, line[:200]
        lines.setdefault(int(found[1]), []).append(found[2])
    return lines


# --- whole lines ---------------------------------------------------------------------------------


def test_32_ranks_with_1000_lines_each_are_shown_whole_once_and_in_order(msrun):
    ended = msrun.run("--worker_num=32", CHATTER, 1000, 7)
    assert (ended.code, ended.err) == (0, "")
    lines = by_rank(ended.out)
    assert sorted(lines) == list(range(32))
    for rank, said in lines.items():
        assert said.pop() == f"{rank} has no end"  # the end was added
        assert len(said) == 1000
        for number, line in enumerate(said):
            text, _, crc = line.rpartition(" ")
            assert text.startswith(f"{rank} {number} ")
            assert zlib.crc32(text.encode()) == int(crc)


def test_carriage_returns_and_bytes_that_are_no_text_pass_within_their_line(msrun):
    job = start(msrun, "--worker_num=2", WRITE, r"10%\r100%\n\xff\x00\xfe RANK\n\n", "")
    out, err = job.process.communicate(timeout=DEADLINE_S)
    assert (job.process.returncode, err) == (0, b"")
    for rank in (b"0", b"1"):
        prefix = b"[rank " + rank + b"]: "
        assert prefix + b"10%\r100%\n" + prefix + b"\xff\x00\xfe " + rank + b"\n" + prefix in out
    assert out.count(b"\n") == 6


def test_a_line_longer_than_a_mebibyte_loses_nothing(msrun, tmp_path):
    (tmp_path / "long.py").write_text("print(3_000_000 * 'x'); print('after')")
    ended = msrun.run("--worker_num=2", "long.py")
    lines = by_rank(ended.out)
    for rank in range(2):
        assert "".join(lines[rank]) == 3_000_000 * "x" + "after"
        assert len(lines[rank]) <= 5  # pieces of about a mebibyte, and the last line by itself
        assert lines[rank][-1] == "after"


def test_a_worker_that_closes_its_streams_is_no_trouble(msrun, tmp_path):
    (tmp_path / "close.py").write_text(
        "import os, sys\nprint('first', flush=True)\n"
        "sys.stdout.close(); sys.stderr.close(); os.closerange(0, 3)\n"
        "open('done', 'a').write('x')\n"
    )
    ended = msrun.run("--worker_num=2", "close.py")
    assert (ended.code, ended.err) == (0, "")
    assert sorted(ended.out.splitlines()) == ["[rank 0]: first", "[rank 1]: first"]
    assert (tmp_path / "done").read_text() == "xx"


# --- what is shown, and how ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, environ, out, err",
    [
        (["--worker_num=2"], {}, ["[rank 0]: out 0", "[rank 0]: err 0", "[rank 1]: out 1", "[rank 1]: err 1"], []),
        (["--worker_num=1"], {}, ["out 0", "err 0"], []),
        (["--worker_num=3", "--local-ranks-filter=2"], {}, ["[rank 2]: out 2", "[rank 2]: err 2"], []),
        (["--worker_num=3", "--tail_worker_log=0,2"], {}, ["[rank 0]: out 0", "[rank 0]: err 0", "[rank 2]: out 2", "[rank 2]: err 2"], []),
        (["--worker_num=2", "--local-ranks-filter=0", "--tail_worker_log=1"], {}, [], []),
        (["--nproc-per-node=2", "-t", "3"], {}, ["[default0]:out 0", "[default1]:out 1"], ["[default0]:err 0", "[default1]:err 1"]),
        (["--nproc-per-node=2", "-t", "3", "--role=tr", "--local-ranks-filter=1"], {}, ["[tr1]:out 1"], ["[tr1]:err 1"]),
        (["--nproc-per-node=2", "-r", "3"], {}, [], []),
        (["--nproc-per-node=2", "-r", "1"], {}, [], ["[rank 0]: err 0", "[rank 1]: err 1"]),
        (["--nproc-per-node=2", "-r", "2"], {}, ["[rank 0]: out 0", "[rank 1]: out 1"], []),
        (["--nproc-per-node=1", "-t", "1:3"], {}, ["out 0", "err 0"], ["msrun: warning: -t=1:3: local rank 1 is ignored, this node has 1."]),
        (["--nproc-per-node=2", "-t", "1:2", "-r", "1:1"], {}, ["[rank 0]: out 0", "[rank 0]: err 0"], ["[default1]:err 1"]),
        (["--worker_num=2"], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}/${rank}/${local_rank}/${other}> "}, ["default/0/0/${other}> out 0", "default/0/0/${other}> err 0", "default/1/1/${other}> out 1", "default/1/1/${other}> err 1"], []),
        (["--nproc-per-node=2", "-t", "1", "-r", "2"], {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}>"}, ["<0>out 0", "<1>out 1"], []),
    ],
)  # fmt: skip
def test_what_is_shown_where_and_under_which_prefix(msrun, args, environ, out, err):
    ended = msrun.run(*args, WRITE, r"out RANK\n", r"err RANK\n", **environ)
    shown, told = (sorted(text.splitlines()) for text in (ended.out, ended.err))
    assert (ended.code, shown, told) == (0, sorted(out), sorted(err))


def test_a_single_workers_prompt_is_shown_at_once_and_as_it_is(msrun, tmp_path):
    go = tmp_path / "go"
    job = start(msrun, WRITE, r"name\xff? ", r"\r50%", go)
    shown, wanted = b"", b"name\xff? \r50%"
    while len(shown) < len(wanted):  # it still runs, so nothing else will ever be shown
        shown += os.read(job.process.stdout.fileno(), 100)
    assert shown == wanted
    go.touch()
    out, err = job.process.communicate(timeout=DEADLINE_S)
    assert (job.process.returncode, out, err) == (0, b"", b"")


def test_with_dev_null_for_logs_workers_have_msruns_own_streams(msrun):
    ended = msrun.run(
        "--log-dir=/dev/null", "--worker_num=2", "-r", "3", WRITE, r"out RANK\n", r"err RANK\n"
    )
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == ["out 0", "out 1"]
    assert sorted(ended.err.splitlines()) == ["err 0", "err 1"]


# --- a console that does not read ----------------------------------------------------------------


def test_a_reader_that_leaves_ends_no_job(msrun):
    job = start(msrun, "--worker_num=2", "-t", "2:3", CHATTER, 300, 1)
    first = job.process.stdout.readline()
    assert first.startswith(b"[rank ")
    job.process.stdout.close()
    assert job.process.wait(DEADLINE_S) == 0
    assert all("has no end" in log for log in job.logs().values())


def test_a_reader_that_left_stdout_may_still_read_stderr(msrun, tmp_path):
    go = tmp_path / "go"
    job = start(msrun, "--nproc-per-node=2", "-t", "3", WORKERS / "two_parts.py", go)
    job.process.stdout.readline()
    job.process.stdout.close()
    go.touch()
    said = job.process.stderr.read().decode().splitlines()
    assert job.process.wait(DEADLINE_S) == 0
    assert sorted(said) == ["[default0]:last word", "[default1]:last word"]


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_become_no_log_files(msrun, closed):
    shut = " ".join(f"{fd}>&-" for fd in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {shut}', "sh", sys.executable, "-m", "msrun", "--log_dir=logs",
         "--worker_num=2", "--max-restarts=1", str(WRITE), r"out RANK\n", r"err RANK\n"],
        env=msrun.env(), cwd=msrun.tmp, capture_output=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == b""
    assert done.stdout.count(b"\n") == (0 if 1 in closed else 4)
    for path in (msrun.tmp / "logs").glob("*.*"):
        assert path.suffix == ".log" or "[rank" not in path.read_text()
    for rank in range(2):
        log = (msrun.tmp / "logs" / f"worker_{rank}.log").read_text()
        assert log == f"out {rank}\nerr {rank}\n"


def test_an_error_that_nobody_hears_has_its_exit_code_all_the_same(msrun):
    ends = os.pipe()
    os.close(ends[0])
    job = start(msrun, "missing.py", err=ends[1])
    os.close(ends[1])
    assert job.process.wait(DEADLINE_S) == 2


def test_a_console_that_takes_nothing_stalls_no_supervision(msrun, small_pipe):
    """Both streams in one full pipe, as under a pager: a death is handled, the ranks restarted."""
    job = start(
        msrun, "--worker_num=2", "--max-restarts=2", WORKERS / "flood_and_wait.py",
        out=small_pipe[1], err=small_pipe[1],
    )  # fmt: skip
    os.close(small_pipe[1])
    small_pipe[1] = None
    for attempt in range(2):
        job.await_lines(f"attempt {attempt} flooded", 2)
        os.kill(poll(lambda attempt=attempt: running(job, attempt))[0], signal.SIGKILL)
    job.await_lines("attempt 2 flooded", 2)
    job.signal(signal.SIGTERM)
    poll(lambda: job.status()["state"] == "stopped")
    shown = read_to_end(small_pipe[0])  # only now somebody reads
    assert job.process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    for word in (b"restart 1 of 2", b"restart 2 of 2", b"stopped by SIGTERM"):
        assert shown.count(b"msrun: " + word) == 1
    for attempt in range(3):
        assert shown.count(b"attempt %d flooded" % attempt) == 2


def running(job, attempt):
    now = job.status()
    pids = [worker["pid"] for worker in now["workers"] if worker["state"] == "running"]
    return now["attempt"] == attempt and len(pids) == 2 and pids


def test_events_are_echoed_as_json_lines_on_stderr_when_asked(msrun):
    ended = msrun.run("--worker_num=2", "--event-log-handler=console", WRITE, "", "")
    events = [json.loads(line)["event"] for line in ended.err.splitlines()]
    assert events.count("WorkerExited") == 2
    assert events[0] == "LaunchRequested"
    assert events[-1] == "Finish"


def test_a_terminal_is_told_who_is_awaited_when_a_start_takes_long(msrun):
    (msrun.tmp / "slow.py").write_text("import time; time.sleep(3)")
    script = msrun.tmp / "train.py"
    script.write_text("import slow")
    ours, theirs = pty.openpty()
    try:
        path = f"{msrun.tmp}:{msrun.env()['PYTHONPATH']}"
        job = start(
            msrun, "--worker_num=3", "--preload=slow", script,
            out=subprocess.DEVNULL, err=theirs, PYTHONPATH=path,
        )  # fmt: skip
        assert job.process.wait(DEADLINE_S) == 0
        shown = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "importing torch and other modules for ranks 0-2 (2 s)" in shown
