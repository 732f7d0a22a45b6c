"""Copies in msrun's memory: what dies with its only holder goes on from the newest, to bitwise the same weights."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable

import pytest
from support.jobs import WORKERS, Launcher
from support.warm_python import WarmPython

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCRIPT = WORKERS / "train_sharded.py"
STEPS = 60
PAUSE = "--pause=0.05"
FIRST = (
    "; once a copy of it is in msrun's memory (the first is on its way), a death means a restart"
)

Undisturbed = Callable[[str, int], str]


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher, warm_python: WarmPython) -> Undisturbed:
    """The digest of a training that nobody guards or disturbs, which runs once."""

    @functools.cache
    def digest(style: str, ranks: int) -> str:
        folder = launcher.tmp / f"{style}-{ranks}-undisturbed"
        warm_python.train(folder, ranks, SCRIPT, style, STEPS)
        return (folder / f"{style}.sha").read_text()

    return digest


@pytest.mark.parametrize(
    ("style", "ranks", "killed", "options", "promise"),
    [
        ("fsdp", 1, [0], (), "partly protected: there is one rank only"),
        ("fsdp", 2, [1], (), "partly protected: ema.0 is cut over ranks 0, 1"),
        ("fsdp", 2, [0, 1], (), "partly protected: ema.0 is cut over ranks 0, 1"),
        ("hsdp", 4, [0, 1, 2, 3], ("--protect-memory=copy",), "protected: a rank that dies"),
    ],
    ids=["one rank alone", "one part of two", "both parts", "all replicas"],
)
def test_training_goes_on_from_the_newest_copy(
    launcher: Launcher,
    undisturbed: Undisturbed,
    style: str,
    ranks: int,
    killed: list[int],
    options: tuple[str, ...],
    promise: str,
) -> None:
    folder = launcher.tmp / f"{style}-{ranks}-{len(killed)}"
    folder.mkdir()
    words = (f"--worker_num={ranks}", "--max-restarts=1", *options, SCRIPT, style, STEPS, PAUSE)
    state = str(folder / "state")
    job = launcher.start(*words, log_dir=folder / "logs", cwd=folder, XDG_STATE_HOME=state)
    job.await_seen("StateCopied")
    pids = job.pids()
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # none may save anything for another one
        for rank in killed:
            os.kill(pids[rank], signum)
    copied = max(one["step"] for one in job.seen("StateCopied"))
    ended = job.wait()
    assert ended.code == 0, ended
    assert ended.err.index(promise) < ended.err.index("SIGKILL"), ended.err
    assert (FIRST in ended.err) == ("partly" in promise), ended.err
    (again,) = job.seen("StartAttempt")[1:]
    assert again["resume"]
    (saved,) = job.seen("CommitDump")
    assert saved["is_copy"]
    assert saved["step"] >= copied > 0
    assert (folder / f"{style}.sha").read_text() == undisturbed(style, ranks)
