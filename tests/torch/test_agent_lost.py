"""kill -9 of msrun itself: the ranks save by themselves and leave, and nothing of the job stays."""

import os
import signal
from pathlib import Path

import pytest
from support.jobs import Job, Launcher, poll

from worker_hooks.storage import manifest as manifests

pytestmark = [pytest.mark.torch, pytest.mark.warm]
SCRIPT = Path(__file__).parents[1] / "workers" / "train_small.py"
RANKS = 3
LONG_S = 60.0


def trained_for(msrun: Launcher, steps: int, ckpt: Path) -> Job:
    """A job whose ranks have all committed so many steps."""
    job = msrun.start(
        f"--nproc-per-node={RANKS}",
        SCRIPT,
        "--pause=0.02",
        "--epochs=99",
        f"--ckpt={ckpt}",
        "--say",
    )
    job.await_lines(f"step {steps}\n", RANKS, LONG_S)
    return job


def dump_of(folder: Path) -> tuple[Path, manifests.Manifest]:
    """The one dump in a folder, verified."""
    (dump,) = folder.glob("tft_saved_checkpoints-step_*[0-9]")
    manifest = manifests.read(dump)
    assert manifests.verify(dump, manifest) == []
    return dump, manifest


def kill(job: Job, msrun: Launcher, *ranks: int) -> None:
    pids = job.pids()
    job.signal(signal.SIGSTOP)  # it must not order anything in between
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    job.signal(signal.SIGKILL)
    job.process.wait()
    poll(lambda: not msrun.marked())


def test_ranks_whose_msrun_is_killed_save_the_same_step_and_leave(msrun, tmp_path):
    job = trained_for(msrun, 5, tmp_path / "ckpt")
    kill(job, msrun)
    dump, manifest = dump_of(tmp_path / "ckpt")
    assert (manifest.without_private, manifest.odd) == ((), ())
    assert manifest.step >= 5
    assert list((tmp_path / "ckpt").iterdir()) == [dump]  # no notes stay behind
    for rank in range(RANKS):
        assert f"msrun is gone; saved: {dump}" in job.logs()[f"worker_{rank}.log"]


def test_a_rank_killed_at_the_same_moment_is_done_without(msrun, tmp_path):
    job = trained_for(msrun, 5, tmp_path / "ckpt")
    kill(job, msrun, 1)
    _, manifest = dump_of(tmp_path / "ckpt")
    assert manifest.without_private == (1,)
    assert manifest.step >= 5


def test_the_lowest_rank_killed_with_msrun_leads_nobody(msrun, tmp_path):
    job = trained_for(msrun, 5, tmp_path / "ckpt")
    kill(job, msrun, 0, 2)
    _, manifest = dump_of(tmp_path / "ckpt")
    assert manifest.without_private == (0, 2)
    assert [shard.rank for shard in manifest.shards if shard.kind == "replicated"] == [1]


def test_where_nothing_can_be_written_the_fallback_is_taken(msrun, tmp_path):
    (tmp_path / "file").touch()  # no folder can be made in it, not even by root
    job = trained_for(msrun, 3, tmp_path / "file" / "ckpt")
    kill(job, msrun)
    dump_of(job.folder / "dumps")
