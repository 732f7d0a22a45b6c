"""Limits of the user: too few descriptors or processes, each a sentence or a clean survival."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.jobs import DEADLINE_S, ROOT, WORKERS, Ended, files, refused, shell

HELLO = "import os; print('hello from', os.environ['RANK'])\n"


@pytest.fixture(autouse=True)
def script(tmp_path):
    path = tmp_path / "hello.py"
    path.write_text(HELLO)
    return path


def test_too_few_open_files_are_refused_at_once(msrun, tmp_path, script):
    ended = shell(msrun, "ulimit -n 20", "--worker_num=8", "--log_dir=logs", script)
    assert "raise ulimit -n" in refused(ended)
    assert files(tmp_path) == {"hello.py"}


@pytest.mark.parametrize("limit", [36, 44])
def test_with_few_open_files_only_the_view_suffers(msrun, tmp_path, limit):
    """Many ranks, one fails and all are restarted, and the report is complete."""
    ended = shell(
        msrun,
        f"ulimit -n {limit}",
        "--worker_num=24",
        "--max-restarts=1",
        "--log_dir=logs",
        WORKERS / "fails_at.py",
        5,
    )
    assert ended.code == 1, ended
    assert "RuntimeError: rank 5 had enough" in ended.err
    assert "restart 1 of 1" in ended.err
    assert ended.err.count("(Too many open files): the job continues") == 1
    logs = [(tmp_path / f"logs/worker_{rank}.log").read_text() for rank in range(24)]
    assert all("begins" in log for log in logs)


def test_with_enough_open_files_every_rank_is_shown(msrun):
    ended = shell(msrun, "ulimit -n 80", "--worker_num=24", "hello.py")
    assert (ended.code, ended.err) == (0, "")
    assert len(ended.out.splitlines()) == 24


@functools.cache
def foreign_python():
    """A Python that a stranger may run, or none."""
    if os.getuid() != 0:
        return None
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        test = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import agent, sys; sys.exit(sys.version_info < (3, 11))"
        with contextlib.suppress(OSError):
            done = subprocess.run(
                [python, "-c", test], user=54321, cwd="/", capture_output=True, check=False
            )
            if done.returncode == 0:
                return python
    return None


@pytest.fixture
def crowded(msrun):
    """Runs msrun as a user who may have so many processes: ``(processes, args) -> (Ended, files)``."""
    python = foreign_python()
    if python is None:
        pytest.skip("needs root, to become another user, and a Python that user may run")
    uid = 40000 + os.getpid() % 20000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "hello.py").write_text(HELLO)

        def run(processes, *args):
            done = subprocess.run(
                [python, "-m", "msrun", "--log_dir=logs", *args, "hello.py"],
                env=msrun.env(PYTHONDONTWRITEBYTECODE="1", XDG_STATE_HOME=f"{name}/state"),
                cwd=name,
                user=uid,
                group=uid,
                extra_groups=[],
                preexec_fn=lambda: resource.setrlimit(
                    resource.RLIMIT_NPROC, (processes, processes)
                ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=DEADLINE_S,
                check=False,
            )
            return Ended(done.returncode, done.stdout.decode(), done.stderr.decode()), files(folder)

        yield run


@pytest.mark.parametrize("join", ["--join=True", "--join=False"])
def test_no_process_at_all_is_one_sentence_and_leaves_nothing(crowded, join):
    ended, left = crowded(1, "--worker_num=2", join)
    assert "(Resource temporarily unavailable)" in refused(ended)
    assert left == {"hello.py"}


@pytest.mark.parametrize("processes", [2, 3, 4, 5])
def test_a_fork_that_fails_halfway_fails_the_job_in_words(crowded, processes):
    ended, _ = crowded(processes, "--worker_num=4")
    assert ended.code == 1, ended
    assert "could not be started: fork: Resource temporarily unavailable" in ended.err
    assert "Traceback" not in ended.err


def test_a_privileged_port_is_one_sentence(crowded):
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 1:
        pytest.skip("no port is privileged here")
    ended, left = crowded(100, "--master_port=1")
    assert "port 1 needs privileges to bind" in refused(ended)
    assert left == {"hello.py"}
