"""Bad input and a bad place to run in: one clear sentence and nothing started, or a clean survival."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile

import pytest
from support.jobs import WORKERS, files, poll, refused, shell

HELLO = "import os; print('hello from', os.environ['RANK'])\n"
MOUNT_FULL = """
mount -t tmpfs -o size=64k tmpfs "$DISK" || exit 77
head -c 65536 /dev/zero > "$DISK/filler" 2> filler.err
"""


@pytest.fixture(autouse=True)
def script(tmp_path):
    path = tmp_path / "hello.py"
    path.write_text(HELLO)
    return path


@functools.cache
def can_mount():
    """Whether this user may mount in a namespace of its own."""
    script = 'mount -t tmpfs -o ro tmpfs "$1" && ! touch "$1/x"'
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError):
        tried = ["unshare", "-m", "sh", "-c", script, "sh", folder]
        return subprocess.run(tried, capture_output=True, check=False).returncode == 0
    return False


@pytest.fixture
def mounts():
    if not can_mount():
        pytest.skip("needs the right to mount in a namespace of its own")


# --- what to run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, told",
    [
        ([], "no script was given"),
        (["--worker_num=2"], "no script was given"),
        ([""], "there is no script ''"),
        (["missing.py"], "there is no script 'missing.py'"),
        (["folder"], "'folder' is a directory without __main__.py"),
        (["--no-python", "./hello.py"], "./hello.py has no exec permission"),
        (["--no-python", "./missing"], "there is no program './missing'"),
        (["--no-python", "./folder"], "'./folder' is a directory"),
        (["--worker_num=0", "hello.py"], "--worker_num=0 must be at least 1"),
        (["--worker_num=-1", "hello.py"], "--worker_num=-1 must be at least 1"),
        (["--worker_num=1000000000", "hello.py"], "--worker_num=1000000000: a node runs at most"),
        (["--worker_num=1e9", "hello.py"], "--worker_num=1e9 is not a whole number"),
        (["--nnodes=2:1", "hello.py"], "MIN:MAX with MIN <= MAX"),
        (["--rdzv-backend=etcd", "hello.py"], "etcd"),
        (["--master_port=65536", "hello.py"], "--master_port=65536 must be at most 65535"),
        (["--master_port=-1", "hello.py"], "--master_port=-1 must be at least 0"),
        (["--master_addr=nohost.invalid", "hello.py"], "'nohost.invalid' does not resolve"),
        (["--master_addr=192.0.2.1", "hello.py"], "192.0.2.1 is not an address of this machine"),
        (["--master_addr=" + 300 * "a", "hello.py"], "does not resolve"),
        (["--config=missing.yaml", "hello.py"], "missing.yaml cannot be read"),
        (["--config=folder", "hello.py"], "folder cannot be read"),
        (["--config=malformed.yaml", "hello.py"], "malformed.yaml is malformed YAML at line 1"),
        (["--config=unknown.yaml", "hello.py"], "unknown key 'worker_nun'"),
        (["--config=binary.yaml", "hello.py"], "binary.yaml is not UTF-8 text"),
        (["--log_dir=hello.py", "hello.py"], "--log_dir=hello.py is not a folder"),
        (["--log_dir=hello.py/sub", "hello.py"], "--log_dir=hello.py/sub is not a folder"),
        (["--log_dir=" + 300 * "a", "hello.py"], "cannot be written (File name too long)"),
    ],
)
def test_what_cannot_be_run_is_one_sentence_and_leaves_nothing(msrun, tmp_path, args, told):
    (tmp_path / "folder").mkdir()
    (tmp_path / "malformed.yaml").write_text("worker_num: [")
    (tmp_path / "unknown.yaml").write_text("worker_nun: 3\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    before = files(tmp_path)
    assert told in refused(shell(msrun, ":", *args))
    assert files(tmp_path) == before


def test_an_empty_script_is_a_job_that_succeeds(msrun, script):
    script.write_text("")
    ended = msrun.run("--worker_num=2", script)
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_a_binary_script_fails_with_pythons_own_words(msrun, script):
    script.write_bytes(b"\x7fELF\xff\x00\xb8" * 50)
    ended = msrun.run("--worker_num=2", script)
    assert ended.code == 1
    assert "SyntaxError" in ended.err
    assert "Traceback" not in ended.err.replace("traceback :", "")


def test_a_script_that_is_a_pipe_is_read_by_the_worker_alone(msrun, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    job = msrun.start(pipe)
    poll(lambda: job.pids().get(0))  # msrun itself did not get stuck on it
    writer = os.open(pipe, os.O_WRONLY)
    os.write(writer, HELLO.encode())
    os.close(writer)
    ended = job.wait()
    assert (ended.code, ended.out) == (0, "hello from 0\n")


def test_a_pipe_that_nobody_fills_can_be_stopped(msrun, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    job = msrun.start(tmp_path / "pipe")
    poll(lambda: job.pids().get(0))
    job.signal(signal.SIGTERM)
    assert job.wait().code == 128 + signal.SIGTERM


# --- the port ------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_sentence(msrun, tmp_path, script):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = msrun.run(f"--master_port={port}", script)
    assert f"port {port} on 127.0.0.1 is already in use" in refused(ended)
    assert files(tmp_path) == {"hello.py"}


# --- the folders ---------------------------------------------------------------------------------


def test_a_log_dir_in_use_by_another_msrun_is_refused_and_left_alone(msrun, tmp_path, script):
    job = msrun.start("--worker_num=2", WORKERS / "speak_and_wait.py", tmp_path / "go")
    job.await_lines("hello from", 2)
    job.await_state("running")
    before = files(tmp_path)
    assert "is in use by another msrun" in refused(msrun.run(script))
    assert files(tmp_path) == before
    (tmp_path / "go").touch()
    ended = job.wait()
    assert ended.code == 0
    assert ended.out.count("bye from") == 2


@pytest.mark.usefixtures("mounts")
def test_a_read_only_log_dir_is_one_sentence(msrun, tmp_path, script):
    (tmp_path / "logs").mkdir()
    ended = shell(
        msrun,
        "mount -t tmpfs -o ro tmpfs logs || exit 77",
        "--log_dir=logs",
        script,
        before=("unshare", "-m"),
    )
    assert "logs cannot be written (Read-only file system)" in refused(ended)


def test_a_working_folder_that_was_deleted_is_one_sentence(msrun, tmp_path, script):
    (tmp_path / "gone").mkdir()
    ended = shell(msrun, "cd gone && rmdir ../gone", "--log_dir=logs", script)
    assert "the working folder does not exist" in refused(ended)
    assert files(tmp_path) == {"hello.py"}


@pytest.mark.parametrize(
    "environ",
    [
        {"HOME": "", "XDG_STATE_HOME": ""},
        {"HOME": "/proc/nowhere", "XDG_STATE_HOME": ""},
        {"HOME": "relative", "XDG_STATE_HOME": "relative"},
    ],
)
def test_without_a_usable_home_records_go_to_the_temporary_folder(msrun, tmp_path, script, environ):
    ended = shell(msrun, ":", script, TMPDIR=str(tmp_path), **environ)
    assert (ended.code, ended.out, ended.err) == (0, "hello from 0\n", "")
    assert [path.name for path in tmp_path.glob("msrun-*/runs/*/worker_0.log")] == ["worker_0.log"]
    assert not (tmp_path / "relative").exists()


@pytest.mark.parametrize(
    "environ",
    [
        {"HOME": "/dev/null/home", "XDG_STATE_HOME": "", "TMPDIR": "/dev/null/tmp"},
        {"XDG_STATE_HOME": "/dev/null/state"},  # it is set, so no other one is tried
    ],
)
def test_without_any_place_for_records_nothing_starts(msrun, tmp_path, script, environ):
    assert "set XDG_STATE_HOME" in refused(shell(msrun, ":", "--log_dir=logs", script, **environ))
    assert files(tmp_path) == {"hello.py"}


# --- the disk ------------------------------------------------------------------------------------


def full_disk(msrun, tmp_path, *args):
    (tmp_path / "disk").mkdir()
    ended = shell(
        msrun,
        MOUNT_FULL,
        "--log_dir=disk/logs",
        *args,
        before=("unshare", "-m"),
        DISK=str(tmp_path / "disk"),
    )
    assert ended.code != 77, "no mount"
    return ended


@pytest.mark.usefixtures("mounts")
def test_a_full_disk_is_said_once_and_the_job_goes_on(msrun, tmp_path, script):
    script.write_text("open('done', 'a').write('x')\n")
    ended = full_disk(msrun, tmp_path, "--worker_num=2", script)
    assert ended.code == 0, ended
    assert (tmp_path / "done").read_text() == "xx"
    (line,) = ended.err.splitlines()
    assert "(No space left on device): the job continues" in line


@pytest.mark.usefixtures("mounts")
def test_a_failure_on_a_full_disk_is_still_told(msrun, tmp_path, script):
    script.write_text("import os; os._exit(7)")
    ended = full_disk(msrun, tmp_path, "--worker_num=2", script)
    assert ended.code == 1
    assert ended.err.count("the job continues") == 1
    assert "exited with code 7" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.usefixtures("mounts")
def test_a_worker_that_prints_onto_a_full_disk_goes_on(msrun, tmp_path, script):
    script.write_text(
        "import sys\n"
        "for _ in range(100):\n"
        "    print(80 * 'x'); print(80 * 'y', file=sys.stderr, flush=True)\n"
        "sys.stdout.buffer.write(b'raw'); sys.stdout.flush()\n"
        "open('done', 'a').write('x')\n"
    )
    ended = full_disk(msrun, tmp_path, "--worker_num=2", script)
    assert ended.code == 0, ended.err
    assert (tmp_path / "done").read_text() == "xx"
    assert ended.err.count("the job continues") == 1


def test_a_log_dir_deleted_under_a_job_costs_logs_only(msrun, tmp_path):
    job = msrun.start("--worker_num=2", WORKERS / "speak_and_wait.py", tmp_path / "go")
    job.await_lines("hello from", 2)
    job.await_state("running")
    shutil.rmtree(job.folder)
    (tmp_path / "go").touch()
    ended = job.wait()
    assert ended.code == 0
    assert ended.out.count("bye from") == 2
    assert ended.err.count("msrun: ") == ended.err.count("the job continues") == 1


# --- what cannot be passed on --------------------------------------------------------------------


def test_long_arguments_reach_every_one_of_many_ranks(msrun, script):
    script.write_text("import sys; print(len(sys.argv[1]))")
    ended = msrun.run("--worker_num=8", script, 100_000 * "x")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count(": 100000\n") == 8


@pytest.mark.parametrize("how", ["--max-restarts=1", "--dry_run"])
def test_arguments_beyond_what_can_be_passed_on_are_one_sentence(msrun, tmp_path, how):
    ended = msrun.run(how, "--log_dir=logs", "hello.py", *4 * [60_000 * "x"])
    assert "the command line of rank 0 is too long" in refused(ended)
    assert files(tmp_path) == {"hello.py"}


@pytest.mark.parametrize("key", ["log_dir", "role", "args", "script"])
@pytest.mark.parametrize("odd, name", [("\0", "a NUL character"), ("\ud800", "U+D800")])
def test_what_only_yaml_can_spell_is_one_sentence_that_names_the_key(
    msrun, tmp_path, key, odd, name
):
    text = f"a{odd}b"
    values = {"script": "hello.py"} | {key: [text] if key == "args" else text}
    (tmp_path / "job.yaml").write_text(json.dumps(values))
    told = refused(shell(msrun, ":", "--config=job.yaml"))
    assert f"job.yaml: {key} contains {name}" in told
    assert files(tmp_path) == {"hello.py", "job.yaml"}
