"""Jobs whose ranks can leave gracefully, started and looked at."""

from __future__ import annotations

from pathlib import Path

from support.jobs import WORKERS, Ended, Job, Launcher
from worker_hooks.storage import manifest

STEP_6 = "tft_saved_checkpoints-step_6"
LINE = "Graceful exit is triggered, stop training"


def start(
    msrun: Launcher, *how: str, ranks: int = 3, options: tuple = (), log_dir: Path | None = None
) -> Job:
    """Ranks that are in their sixth step, and wait."""
    (msrun.tmp / "ckpt").mkdir(exist_ok=True)
    words = (f"--nproc-per-node={ranks}", *options, WORKERS / "guarded.py", "ckpt", *how)
    job = msrun.start(*words, log_dir=log_dir)
    job.await_state("running")
    job.await_seen("Registered", ranks)
    return job


def saved(msrun: Launcher, step: int) -> manifest.Manifest:
    """What is saved of that step, verified; nothing else is there."""
    (folder,) = (msrun.tmp / "ckpt").iterdir()
    assert folder.name == f"tft_saved_checkpoints-step_{step}"
    found = manifest.read(folder)
    assert manifest.verify(folder, found) == []
    return found


def check_graceful(msrun: Launcher, job: Job, ended: Ended, why: str, step: int = 6) -> None:
    assert ended.code == 0, ended.err
    path = msrun.tmp / "ckpt" / f"tft_saved_checkpoints-step_{step}"
    lines = ended.err.splitlines()
    assert lines[-3:] == [
        f"msrun: graceful exit: {why}, every rank exited with 0",
        f"msrun: saved: step {step}, 3 ranks, {path}",
        "msrun: to resume: msrun --resume",
    ]
    assert "Root Cause" not in ended.err
    assert [log.count(LINE) for log in job.logs().values()] == [1] * 3
    assert job.status()["state"] == "stopped"
    assert saved(msrun, step).reason == f"graceful exit: {why}"
    assert not (job.folder / "failure.json").exists()
