"""Scripts that ask by themselves to go on, from what is whole and from what is not."""

from __future__ import annotations

import json
import os

import pytest
from support.checkpoints import SHARD, flipped, saved
from support.jobs import WORKERS, Launcher

STEP_5 = "tft_saved_checkpoints-step_5"


def test_what_a_script_found_by_itself_is_gone_on_from(msrun: Launcher) -> None:
    folder = saved(msrun.tmp / "ckpt", step=5)
    before = folder.stat().st_ino
    words = ("--nproc-per-node=2", "--max-restarts=3", WORKERS / "guarded.py", "ckpt")
    job = msrun.start(*words, "all=asks", "1=dies")
    ended = job.wait()
    assert ended.code == 1
    resumes = [one["resume"] for one in job.seen("StartAttempt")]
    assert resumes == [None, str(folder), str(folder)]
    assert os.listdir(msrun.tmp / "ckpt") == [STEP_5]  # the same is not saved once more
    assert folder.stat().st_ino == before
    assert f"resumed from {folder} with --is_recover=1" in job.logs()["worker_0.log"]
    why = "3 attempts in a row reached no commit after step 5 (1 of 3 restarts left unused)"
    assert ended.err.splitlines()[-3:] == [
        f"msrun: gave up: {why}",
        f"msrun: saved: step 5, 2 ranks, {folder}",
        "msrun: to resume: msrun --resume",
    ]
    assert json.loads((job.folder / "failure.json").read_bytes())["gave_up"] == why


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_refusal_is_said_once_and_ends_the_job(msrun: Launcher, ranks: int) -> None:
    folder = saved(msrun.tmp / "ckpt", step=5)
    flipped(folder / SHARD)
    words = (f"--nproc-per-node={ranks}", "--max-restarts=3", WORKERS / "guarded.py", "ckpt")
    job = msrun.start(*words, "all=asks")
    ended = job.wait()
    assert ended.code == 2
    skipped, refusal = ended.err.splitlines()
    assert skipped.startswith(f"msrun: {folder} is skipped: ")
    why = f"no checkpoint in {msrun.tmp}/ckpt can be trusted: move them away to begin anew"
    assert refusal == f"msrun: {why}"
    assert why not in ended.out
    assert len(job.seen("StartAttempt")) == 1
    (refused,) = job.seen("RefuseRanks")  # who asked too late for it was stopped
    assert refused["ranks"]
    assert all(why in job.logs()[f"worker_{rank}.log"] for rank in refused["ranks"])
    report = json.loads((job.folder / "failure.json").read_bytes())
    assert (report["root"], report["reason"]) == (None, why)
