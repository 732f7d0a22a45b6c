"""A state home of one's own: runs elsewhere are not seen, not stopped, and not resumed."""

import os
from pathlib import Path

import pytest
from support.jobs import WORKERS, Launcher, poll, refused


@pytest.fixture
def foreign(msrun: Launcher, tmp_path: Path):
    """A job of the same user that is recorded in the user's home."""
    environ = {"XDG_STATE_HOME": "", "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    job = msrun.start("--nproc-per-node=2", WORKERS / "wait.py", **environ)
    job.await_state("running")
    return job


def test_a_run_in_another_state_home_is_left_alone(msrun, tmp_path, foreign):
    for words in (
        ["stop"],
        ["stop", "--now"],
        ["status"],
        ["logs"],
        ["top", "--once"],
        ["--resume"],
    ):
        ended = msrun.command(*words, HOME=str(tmp_path / "home"), TMPDIR=str(tmp_path))
        assert refused(ended).startswith("no run "), words
    assert foreign.status()["state"] == "running"
    assert foreign.process.poll() is None


def test_without_a_state_home_of_ones_own_it_is_found_and_stopped(msrun, tmp_path, foreign):
    home = {"XDG_STATE_HOME": "", "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    assert msrun.command("stop", **home).code == 0
    assert poll(lambda: foreign.process.poll() is not None)


def test_every_test_has_a_state_home_of_its_own(tmp_path_factory):
    folder = Path(os.environ["XDG_STATE_HOME"])
    assert folder.is_relative_to(tmp_path_factory.getbasetemp())
    assert not folder.exists()
