"""What a rank knows of its peers when the agent is dead: who can answer, and what they last did."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from support.jobs import poll
from support.status_pages import make, write

from worker_hooks.contract.process_stat import read_stat
from worker_hooks.guard.peers import KnownPeers


@pytest.fixture
def peers():
    known = KnownPeers()
    yield known
    known.forget()


@pytest.fixture
def sleepers():
    """Two processes."""
    found = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield found
    for one in found:
        one.kill()
        one.wait()


def test_who_is_stopped_or_dead_can_answer_nobody(peers, sleepers):
    pids = [one.pid for one in sleepers]
    peers.learn([1, 3], pids, [make(rank)[0] for rank in (1, 3)])
    assert peers.awake() == {1, 3}
    assert peers.are_all_awake
    os.kill(pids[0], signal.SIGSTOP)
    poll(lambda: read_stat(pids[0]).is_stopped)
    assert (peers.awake(), peers.stopped(), peers.are_all_awake) == ({3}, {1}, False)
    os.kill(pids[1], signal.SIGKILL)
    poll(lambda: read_stat(pids[1]).is_dead)  # its parent has not asked for it
    assert (peers.awake(), peers.stopped()) == (set(), {1})
    assert set(peers) == {1, 3}


def test_only_those_that_are_there_are_killed(peers, sleepers):
    pids = [one.pid for one in sleepers]
    peers.learn([0, 1], pids, [make(rank)[0] for rank in (0, 1)])
    sleepers[1].kill()
    sleepers[1].wait()
    assert peers.end([0, 1, 7]) == [0]
    assert sleepers[0].wait() == -signal.SIGKILL


def test_a_process_with_the_pid_of_a_dead_peer_is_no_peer(peers, sleepers, monkeypatch):
    pid = sleepers[0].pid
    peers.learn([0], [pid], [make()[0]])
    later = read_stat(pid)._replace(born=read_stat(pid).born + 1)
    monkeypatch.setattr("worker_hooks.guard.peers.read_stat", lambda _: later)
    assert (peers.awake(), peers.end([0])) == (set(), [])
    assert sleepers[0].poll() is None


def test_the_page_of_a_dead_peer_stays_and_a_newer_one_replaces_it(peers):
    before = len(os.listdir("/proc/self/fd"))
    for step in (4, 5):
        fd, page = make(2)
        write(page, step, step)
        peers.learn([2], [os.getpid()], [fd])
        del page
    assert peers.pages()[2].newest_step() == 5
    peers.forget()
    assert len(os.listdir("/proc/self/fd")) == before
    assert peers.pages() == {}


def test_a_rank_whose_page_did_not_arrive_is_unknown(peers):
    """The kernel leaves descriptors out for which there is no room."""
    peers.learn([0, 1], [os.getpid()] * 2, [make()[0]])
    assert set(peers) == {0}
