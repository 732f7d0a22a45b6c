"""`msrun checkpoints` as a process: at a terminal, in a pipe, and killed while it deletes."""

from __future__ import annotations

import os
import pty
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import flipped, newest, saved
from support.jobs import DEADLINE_S, ROOT

from worker_hooks.storage import retention
from worker_hooks.storage.manifest import read, verify

MSRUN = [sys.executable, "-m", "msrun", "checkpoints"]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}


def several(folder: Path, number: int = 6) -> Path:
    for step in range(1, number + 1):
        saved(folder, f"CKP-0_{step}", step=step, saved_at=float(step))
    return folder


def at_terminal(answer: str, *words: object) -> tuple[int, str]:
    """The command at a terminal of its own, and all that appears there."""
    ours, its = pty.openpty()
    try:
        process = subprocess.Popen(
            [*MSRUN, *map(str, words)], stdin=its, stdout=its, stderr=its, env=ENVIRON
        )
        os.close(its)
        os.write(ours, answer.encode())
        shown = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # the last of its users has left
                break
            shown += more
        return process.wait(DEADLINE_S), shown.decode()
    finally:
        os.close(ours)


@pytest.mark.parametrize(("answer", "left"), [("n\n", 6), ("\n", 6), ("y\n", 2), ("\x04", 6)])
def test_a_person_is_asked_before_anything_goes(tmp_path, answer, left):
    code, shown = at_terminal(answer, "prune", "--keep=2", several(tmp_path))
    assert (code, "? [y/N]" in shown) == (0, True)
    assert len(os.listdir(tmp_path)) == left
    assert (newest(tmp_path, print) or ())[0] == tmp_path / "CKP-0_6"


def test_a_person_sees_how_far_it_is_and_a_pipe_does_not(tmp_path):
    code, shown = at_terminal("", "verify", several(tmp_path))
    assert (code, "verifying" in shown, "whole: CKP-0_6" in shown) == (0, True, True)
    done = subprocess.run(
        [*MSRUN, "verify", tmp_path], env=ENVIRON, capture_output=True, text=True, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr, "\x1b" in done.stdout) == (0, "", False)


def test_exit_codes_tell_programs_what_is_there(tmp_path):
    flipped(several(tmp_path) / "CKP-0_3" / "rank_0" / "ttp_rank_0-0_7.safetensors")
    for words, code in ((["verify", tmp_path], 1), (["list", tmp_path], 0), (["list", "/x"], 2)):
        done = subprocess.run(
            [*MSRUN, *map(str, words)],
            env=ENVIRON,
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == code
    assert done.stderr == b"msrun: error: /x does not exist\n"


KILLED = """
import os, signal, sys
from msrun.commands import run
left = int(sys.argv[1])
def counted(real):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call
for name in ("rename", "unlink", "rmdir", "fsync"):
    setattr(os, name, counted(getattr(os, name)))
sys.exit(run(["checkpoints", "prune", "--keep=2", "--yes", sys.argv[2]]))
"""


@pytest.mark.parametrize("seed", range(5))
def test_killed_while_it_deletes_it_leaves_whole_ones_and_the_next_goes_on(tmp_path, seed):
    folder = several(tmp_path)
    point = random.Random(seed).randint(1, 4 * 8)  # 4 go, each by eight calls or more
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(point), str(folder)], env=ENVIRON, timeout=DEADLINE_S,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == -9, done
    kept = retention.present(folder)
    assert len(kept) >= 2
    assert all(verify(path, manifest) == [] for path, manifest in kept)
    found = newest(folder, print)
    assert found is not None
    assert found[1].step == 6
    subprocess.run(
        [*MSRUN, "prune", "--keep=2", "--yes", folder], env=ENVIRON, timeout=DEADLINE_S, check=True,
        capture_output=True,
    )  # fmt: skip
    assert sorted(os.listdir(folder)) == ["CKP-0_5", "CKP-0_6"]
    assert read(folder / "CKP-0_6").step == 6
