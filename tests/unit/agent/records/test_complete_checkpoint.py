"""A checkpoint that a run has completed must be there, or something newer, before it goes on."""

from types import SimpleNamespace

import pytest

from agent.records import complete_checkpoint
from agent.records.complete_checkpoint import CompleteCheckpoint, look_until_there


@pytest.fixture
def clock(monkeypatch):
    """Time passes while one waits, and no other time."""
    now = SimpleNamespace(s=100.0)

    def sleep(seconds):
        now.s += seconds

    monkeypatch.setattr(complete_checkpoint.time, "monotonic", lambda: now.s)
    monkeypatch.setattr(complete_checkpoint.time, "sleep", sleep)
    return now


def known(tmp_path, is_there=False):
    path = tmp_path / "net-1_7"
    if is_there:
        path.mkdir()
    return CompleteCheckpoint(str(path), 7)


@pytest.mark.parametrize(
    ("is_there", "found", "is_away"),
    [(False, -1, True), (False, 6, True), (False, 7, False), (False, 9, False), (True, -1, False)],
)
def test_what_is_not_there_is_away_unless_something_as_new_is(tmp_path, is_there, found, is_away):
    """One that is there and damaged is named by who looks for checkpoints."""
    assert known(tmp_path, is_there).is_away(found) is is_away


def test_it_says_which_one_and_where(tmp_path):
    one = known(tmp_path)
    assert one.folder == str(tmp_path)
    assert f"{tmp_path}/net-1_7 (step 7), is not there" in one.describe()


def test_where_none_is_known_one_look_is_enough(clock):
    assert look_until_there(None, lambda: -1, int) == (-1, False)
    assert clock.s == 100.0


def test_a_file_server_that_is_late_is_awaited(tmp_path, clock):
    looks = iter([-1, 3, 7])
    assert look_until_there(known(tmp_path), lambda: next(looks), int) == (7, False)
    assert clock.s > 100.0


def test_one_that_stays_away_is_given_up_after_a_while(tmp_path, clock):
    assert look_until_there(known(tmp_path), lambda: 3, int) == (3, True)
    assert clock.s - 100.0 >= complete_checkpoint.LATE_S


def test_nobody_waits_for_what_nobody_wants_any_more(tmp_path, clock):
    assert look_until_there(known(tmp_path), lambda: -1, int, lambda: True) == (-1, True)
    assert clock.s == 100.0
