"""What somebody sees when a test of ours fails."""

import os
import subprocess
import sys

from support.jobs import ROOT

FAILING = """
def test_that_fails(msrun, tmp_path):
    (tmp_path / "train.py").touch()
    assert msrun.run("--nproc-per-node=1", "train.py").code == 3
"""


def test_the_end_of_the_jobs_event_log_is_shown(tmp_path):
    (tmp_path / "test_failing.py").write_text(FAILING)
    words = ("-c", ROOT / "pyproject.toml", "-p", "conftest", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "test_failing.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    title, events = done.stdout.split("logs/scheduler.log", 1)
    assert "- end of /" in title
    assert "StartAttempt" in events
    assert "Finish" in events
