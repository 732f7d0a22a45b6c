"""The JSON file in which a graceful exit is asked for: only a change during the run asks."""

import os
import time

import pytest

from agent.hooks import exit_files
from agent.hooks.exit_files import ExitFiles

ASKS = '{"GracefulExit": 1}'
DOES_NOT = '{"GracefulExit": 0}'


class Heard:
    """A watch without its thread: the test looks itself."""

    def __init__(self, monkeypatch, began_s):
        monkeypatch.setattr(exit_files.threading.Thread, "start", lambda _: None)
        self.asked, self.said = [], []
        self.files = ExitFiles(began_s, self.asked.append, self.said.append)

    def add(self, path, is_early=False):
        self.files.add(str(path), is_early=is_early)
        self.files.look()

    def look(self):
        self.files.look()
        return len(self.asked)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "exit.json"


@pytest.fixture
def heard(monkeypatch):
    return Heard(monkeypatch, time.time() - 3600)


@pytest.fixture
def late(monkeypatch):
    """The run begins after what is there was written."""
    return Heard(monkeypatch, time.time() + 3600)


def write(path, content, at_s=None):
    path.write_text(content)
    if at_s is not None:
        os.utime(path, (at_s, at_s))


@pytest.mark.parametrize("is_early", [True, False])
def test_a_file_that_comes_during_the_run_asks_once(heard, path, is_early):
    heard.add(path, is_early)
    assert heard.look() == 0
    write(path, ASKS)
    assert [heard.look(), heard.look()] == [1, 1]
    assert heard.asked == [f"{path} asks for it"]
    assert heard.said == []


def test_a_changed_file_asks(late, path):
    write(path, DOES_NOT)
    late.add(path)
    write(path, ASKS, 1)  # whatever its clock says
    assert late.look() == 1
    write(path, DOES_NOT, 2)
    assert late.look() == 1
    write(path, ASKS, 3)
    assert late.look() == 2
    os.utime(path)
    assert late.look() == 3


def test_a_request_that_was_met_does_not_stop_the_next_run(late, path):
    write(path, ASKS)
    late.add(path)
    assert late.look() == 0
    (said,) = late.said
    assert f"{path} has asked for a graceful exit since before this run began" in said
    assert "change the file to ask again" in said


def test_before_anything_was_started_all_is_old_whatever_the_clocks_say(heard, path):
    write(path, ASKS, time.time() + 7200)
    heard.add(path, is_early=True)
    assert heard.look() == 0
    assert len(heard.said) == 1


def test_what_was_asked_while_the_script_started_counts(heard, path):
    write(path, ASKS)
    heard.add(path)
    assert heard.look() == 1


def test_a_file_that_is_moved_there_asks(late, path, tmp_path):
    write(path, DOES_NOT, 5)
    late.add(path)
    write(tmp_path / "other.json", ASKS, 5)
    os.replace(tmp_path / "other.json", path)
    assert late.look() == 1


def test_a_file_that_goes_and_comes_back_asks(late, path):
    write(path, ASKS, 5)
    late.add(path)
    path.unlink()
    assert late.look() == 0
    write(path, ASKS)
    assert late.look() == 1


def test_adding_it_again_changes_nothing(heard, path):
    heard.add(path)
    write(path, ASKS)
    assert heard.look() == 1
    heard.add(path)
    assert heard.look() == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "it is no JSON"),
        ("", "it is no JSON"),
        ("\0", "it is no JSON"),
        ("[1]", 'it must be an object such as {"GracefulExit": 1}'),
        ('{"GracefulExit": "yes"}', '"GracefulExit" must be 1 or 0'),
        ('{"GracefulExit": 2}', '"GracefulExit" must be 1 or 0'),
        ('{"GracefulExit": [1]}', '"GracefulExit" must be 1 or 0'),
        ("[" * 60_000, "it is no JSON"),
    ],
)
def test_nonsense_is_said_once(heard, path, content, why):
    heard.add(path)
    write(path, content, 7)
    assert heard.look() == 0
    assert heard.said == []  # it may be half written
    assert heard.look() == 0
    (said,) = heard.said
    assert said.startswith(f"{path} asks for nothing: {why}")
    write(path, content + " ", 8)
    assert [heard.look(), heard.look(), heard.look()] == [0, 0, 0]
    assert len(heard.said) == 1
    write(path, ASKS)
    assert heard.look() == 1


def test_what_is_half_written_is_looked_at_again(heard, path):
    heard.add(path)
    write(path, ASKS[:7], 7)
    assert heard.look() == 0
    write(path, ASKS, 7)
    assert heard.look() == 1
    assert heard.said == []


@pytest.mark.parametrize("content", ["{}", '{"Other": 1}', DOES_NOT, '{"GracefulExit": false}'])
def test_what_asks_for_nothing(heard, path, content):
    heard.add(path)
    write(path, content)
    assert heard.look() == 0
    assert heard.said == []


def test_true_asks_too(heard, path):
    heard.add(path)
    write(path, '{"GracefulExit": true, "by": "me"}')
    assert heard.look() == 1


def test_a_folder_and_a_pipe_are_no_files(heard, tmp_path):
    for name, make in (("folder", os.mkdir), ("pipe", os.mkfifo)):
        heard.add(tmp_path / name)
        make(tmp_path / name)
    assert [heard.look(), heard.look()] == [0, 0]
    assert len(heard.said) == 2


def test_names_that_no_file_can_have(heard):
    for name in ("a\0b", "x" * 5000, ""):
        heard.add(name)
    assert heard.look() == 0


def test_the_thread_looks_by_itself_and_ends(path):
    import threading

    asked = threading.Event()
    files = ExitFiles(0.0, lambda _: asked.set(), print)
    files.add(str(path), is_early=False)
    write(path, ASKS)
    assert asked.wait(10)
    files.close()
    files._thread.join(10)
    assert not files._thread.is_alive()
