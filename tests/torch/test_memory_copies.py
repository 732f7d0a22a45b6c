"""Copies in msrun's memory: what dies with its only holder goes on from the newest, to bitwise the same weights."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import WORKERS, Launcher
from support.warm_python import WarmPython

from worker_hooks.storage import manifest as manifests

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
        ("fsdp", 1, [0], ("--protect-memory=copy",), "partly protected: there is one rank only"),
        (
            "fsdp",
            2,
            [1],
            ("--protect-memory=copy",),
            "partly protected: ema.0 is cut over ranks 0, 1",
        ),
        (
            "fsdp",
            2,
            [0, 1],
            ("--protect-memory=copy",),
            "partly protected: ema.0 is cut over ranks 0, 1",
        ),
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
    (early,) = job.seen("DumpCommitted")  # all restart from memory at once
    assert early["is_early"]
    (written,) = job.seen("CheckpointWritten")
    assert not written["why_not"]
    assert manifests.read(Path(written["path"])).step == saved["step"]
    assert saved["step"] >= copied > 0
    assert (folder / f"{style}.sha").read_text() == undisturbed(style, ranks)


WHOLE = WORKERS / "train_whole.py"


@pytest.fixture(scope="module")
def whole(launcher: Launcher, warm_python: WarmPython) -> str:
    """The digest of a training of three ranks that nobody guards or disturbs."""
    folder = launcher.tmp / "whole-undisturbed"
    warm_python.train(folder, 3, WHOLE)
    return (folder / "whole.sha").read_text()


def kill_all(pids: dict[int, int]) -> None:
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids.values():
            os.kill(pid, signum)


def test_all_ranks_go_on_from_memory_where_no_disk_takes_it_and_again_after_the_next_failure(
    launcher: Launcher, whole: str
) -> None:
    folder = launcher.tmp / "no-disk"
    folder.mkdir()
    (folder / "logs").mkdir()
    for name in ("dumps", "logs/dumps"):  # the script's folder, and the fallback
        (folder / name).write_text("in the way")
    words = ("--worker_num=3", "--max-restarts=2", "--protect-memory=copy")
    state = str(folder / "state")
    job = launcher.start(
        *words, WHOLE, PAUSE, log_dir=folder / "logs", cwd=folder, XDG_STATE_HOME=state
    )
    job.await_seen("StateCopied")
    kill_all(job.pids())
    job.await_seen("StartAttempt", 2)
    job.await_seen("WorkerStarted", 6)
    kill_all(job.pids())  # before or after they have read it
    ended = job.wait()
    assert ended.code == 0, ended
    assert len(job.seen("StartAttempt")) == 3
    assert any(each["why_not"] for each in job.seen("CheckpointWritten"))
    assert "it stays in msrun's memory" in ended.err
    assert (folder / "whole.sha").read_text() == whole


def test_ranks_of_a_script_without_run_go_on_from_memory_while_a_large_state_is_written(
    launcher: Launcher, whole: str
) -> None:
    folder = launcher.tmp / "large"
    folder.mkdir()
    words = (
        "--worker_num=3",
        "--max-restarts=1",
        "--protect-memory=copy",
        WHOLE,
        PAUSE,
        "--fill=200",
    )
    state = str(folder / "state")
    job = launcher.start(*words, log_dir=folder / "logs", cwd=folder, XDG_STATE_HOME=state)
    job.await_seen("StateCopied")
    kill_all(job.pids())
    ended = job.wait()
    assert ended.code == 0, ended
    (written,) = job.seen("CheckpointWritten")
    path = Path(written["path"])
    assert manifests.verify(path, manifests.read(path)) == []
    assert (folder / "whole.sha").read_text() == whole
