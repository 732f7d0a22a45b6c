"""Several msruns of one node: the first leads, the others end as it does."""

import contextlib
import signal
import subprocess
import sys
import uuid

import pytest

from agent.launch.team import Leader, follow
from agent.spec.job_spec import NotStartedError

FOLLOW = "import sys; from agent.launch.team import follow; sys.exit(follow(sys.argv[1], 30.0))"


@pytest.fixture
def team():
    return uuid.uuid4().hex


@pytest.fixture
def followers(team):
    started = []

    def start(count):
        words = [sys.executable, "-c", FOLLOW, team]
        started.extend(subprocess.Popen(words, stderr=subprocess.PIPE) for _ in range(count))
        return started

    yield start
    for each in started:
        each.kill()
        each.communicate()


@pytest.mark.parametrize("code", [0, 1, 2, -9, 143])
def test_the_others_end_with_the_code_of_the_first(team, followers, code):
    others = followers(2)  # they may come before it
    Leader(team, 2).dismiss(code)
    assert [each.wait(60) for each in others] == [code % 256] * 2


def test_a_signal_to_all_is_the_first_ones(team, followers):
    leader = Leader(team, 1)
    (other,) = followers(1)
    with leader._door:
        connection, _ = leader._door.accept()  # it waits
        with connection:
            other.send_signal(signal.SIGTERM)
            other.send_signal(signal.SIGINT)
            connection.sendall(b"\0\0\0\7")
            assert other.wait(60) == 7


def test_a_first_one_that_is_killed_ends_the_others(team, followers):
    leads = "import sys; from agent.launch.team import Leader; kept = Leader(sys.argv[1], 1); input('.')"
    words = [sys.executable, "-c", leads, team]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as leader:
        assert leader.stdout.read(1) == b"."
        (other,) = followers(1)
        assert other.poll() is None
        leader.kill()
    with Leader(team, 1)._door as door:
        door.settimeout(0.05)
        while other.poll() is None:
            with contextlib.suppress(TimeoutError):  # it comes only now
                door.accept()[0].close()
    assert other.returncode == 1


def test_who_does_not_come_is_not_waited_for_long(team, monkeypatch):
    monkeypatch.setattr("agent.launch.team._LAST_ONES_S", 0.01)
    Leader(team, 5).dismiss(0)


def test_there_is_one_first(team):
    leader = Leader(team, 0)
    with leader._door, pytest.raises(NotStartedError, match="another msrun leads"):
        Leader(team, 0)


def test_a_first_one_that_never_starts_is_not_waited_for_for_ever(team):
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    handlers |= {each: signal.getsignal(each) for each in (signal.SIGHUP, signal.SIGQUIT)}
    try:
        with pytest.raises(NotStartedError, match=r"has not started within 0\.1 s"):
            follow(team, 0.1)
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
