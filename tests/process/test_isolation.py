"""A state home of one's own: runs elsewhere are not seen, not stopped, and not resumed."""

import os
import stat
from pathlib import Path

import pytest
from support.jobs import WORKERS, Launcher, poll, refused, shell


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


@pytest.mark.parametrize("umask", ["000", "002", "022"])
def test_nobody_else_may_write_to_a_log_whatever_the_umask_is(msrun, tmp_path, umask):
    words = (f"--log_dir={tmp_path}/new/logs", "--max-restarts=1")
    script = tmp_path / "fails.py"
    script.write_text("import os, sys; print(os.umask(0)); sys.exit(3)")
    for _ in range(2):  # the second run moves the files of the first one
        ended = shell(msrun, f"umask {umask}", *words, script)
        assert ended.code == 1
    found = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in found}
    assert modes == {(True, 0o755), (False, 0o644)}
    assert (tmp_path / "new/logs/worker_0.log").read_text() == f"{int(umask, 8)}\n"  # the script's
