"""Ranks without an agent see who of them lives; nobody else can show or hide one."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator

import pytest

from worker_hooks.contract.layout import held
from worker_hooks.guard.liveness_lock import LivenessLock


@pytest.fixture
def path() -> Iterator[str]:
    fd = os.memfd_create("test-liveness")
    yield held(fd)
    os.close(fd)


@pytest.fixture
def peer(path) -> Iterator[int]:
    """Rank 1, in a group of its own with its child."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        lock = LivenessLock(path, 1, 3)
        if os.fork() == 0:
            signal.pause()
        os.write(tell, f"{lock.live_ranks()}".encode())
        signal.pause()
    os.close(tell)
    assert os.read(told, 100)
    os.close(told)
    yield pid
    os.killpg(pid, signal.SIGKILL)


def test_who_lives_is_seen_until_the_moment_of_death_though_a_child_lives_on(path, peer):
    lock = LivenessLock(path, 0, 3)
    assert lock.live_ranks() == {0, 1}
    os.kill(peer, signal.SIGKILL)
    os.waitpid(peer, 0)
    assert lock.live_ranks() == {0}
    lock.close()


def test_a_child_that_closes_it_does_not_hide_its_rank(path, peer):
    lock = LivenessLock(path, 0, 3)
    if (child := os.fork()) == 0:
        lock.close()
        seen = LivenessLock(path, 2, 3).live_ranks()
        os._exit(0 if seen == {0, 1, 2} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lock.live_ranks() == {0, 1}
    lock.close()
    os.waitpid(peer, os.WNOHANG)


@pytest.mark.usefixtures("peer")
def test_a_second_process_of_a_rank_is_said(path, caplog):
    LivenessLock(path, 1, 3).close()
    assert [one.getMessage() for one in caplog.records] == [
        "msrun: another process has the place of rank 1"
    ]


def test_where_it_cannot_be_known_all_count_as_alive(caplog):
    assert LivenessLock("", 0, 3).live_ranks() == {0, 1, 2}
    assert caplog.records == []
    assert LivenessLock("/proc/1/fd/none", 0, 3).live_ranks() == {0, 1, 2}
    assert "peers cannot see whether rank 0 is alive" in caplog.text


def test_the_file_has_no_name_and_is_the_users_alone(path):
    assert os.readlink(path).startswith("/memfd:")
    found = os.stat(os.path.dirname(path))
    assert (found.st_uid, stat.S_IMODE(found.st_mode) & 0o077) == (os.geteuid(), 0)
