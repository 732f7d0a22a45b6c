"""Ranks with hooks, a dump among them, and everything that can go wrong on the way to its commit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.jobs import WORKERS, Job, Launcher, poll, shell

from agent.spec.job_spec import DumpSpec, Timeouts
from worker_hooks.storage import manifest

STEP_5 = "tft_saved_checkpoints-step_5"


def start(
    msrun: Launcher,
    *how: str,
    ranks: int = 3,
    options: tuple = (),
    ready: int | None = None,
    **environ: str,
):
    """Ranks that committed five steps and wait."""
    (msrun.tmp / "ckpt").mkdir(exist_ok=True)
    words = (f"--nproc-per-node={ranks}", *options, WORKERS / "guarded.py", "ckpt", *how)
    job = msrun.start(*words, **environ)
    job.await_lines("ready\n", ranks if ready is None else ready)
    job.await_state("running")
    poll(lambda: len(job.seen("Registered")) >= (ranks if ready is None else ready))
    return job


def kill(job: Job, rank: int) -> None:
    os.kill(job.pids()[rank], signal.SIGKILL)


def saved(folder: Path) -> manifest.Manifest:
    """A dump that is whole."""
    found = manifest.read(folder)
    assert manifest.verify(folder, found) == []
    return found


def writers(found: manifest.Manifest) -> set[int]:
    return {shard.rank for shard in found.shards if shard.kind == "replicated"}


def test_a_killed_rank_is_followed_by_a_dump_and_a_restart_that_goes_on(msrun: Launcher) -> None:
    job = start(msrun, options=("--max-restarts=1",))
    poll(lambda: [worker.get("step") for worker in job.status()["workers"]] == [5, 5, 5])
    kill(job, 2)
    ended = job.wait()
    folder = msrun.tmp / "ckpt" / STEP_5
    assert ended.code == 0, ended
    assert os.listdir(msrun.tmp / "ckpt") == [STEP_5]
    found = saved(folder)
    assert (found.step, found.epoch, found.batch, found.world_size) == (5, 1, 5, 3)
    assert (found.attempt, found.digest, found.odd) == (0, "same", ())
    assert found.without_private == found.stale_private == ()
    assert writers(found) < {0, 1}
    assert {shard.rank for shard in found.shards if shard.kind == "private"} == {0, 1, 2}
    (writer,) = writers(found)
    assert f"step 5 saved by rank {writer} in 0." in ended.err
    assert f": {folder}\n" in ended.err
    for log in (job.folder / f"worker_{rank}.log" for rank in range(3)):
        assert f"resumed from {folder} with --is_recover=1\n" in log.read_text()
    (committed,) = job.seen("DumpCommitted")
    assert committed["path"] == str(folder)
    assert committed["nbytes"] == sum(shard.nbytes for shard in found.shards)
    assert 0 < committed["write_s"] < DumpSpec().stall_s
    assert 0 < committed["commit_s"] < DumpSpec().stall_s
    (exited,) = [one for one in job.seen("WorkerExited") if one["exit_code"] == -9]
    assert exited["step"] == 5


def test_without_restarts_the_job_fails_with_the_state_saved(msrun: Launcher) -> None:
    job = start(msrun)
    kill(job, 0)
    ended = job.wait()
    assert ended.code == 1
    assert "rank 0 on " in ended.err
    assert "was killed by SIGKILL" in ended.err or "SIGKILL" in ended.err
    saved(msrun.tmp / "ckpt" / STEP_5)
    assert job.status()["workers"][1]["step"] == 5


def test_a_writer_that_dies_in_the_middle_is_replaced(msrun: Launcher) -> None:
    job = start(msrun, "all=first", ranks=4)
    kill(job, 3)
    assert job.wait().code == 1
    found = saved(msrun.tmp / "ckpt" / STEP_5)
    dead = {one["rank"] for one in job.seen("WorkerExited") if one["exit_code"] == -9}
    assert len(dead) == 2
    assert len(writers(found)) == 1
    assert not writers(found) & dead
    half = msrun.tmp / "ckpt" / STEP_5 / f"rank_{(dead - {3}).pop()}"
    assert [path.name.split("_")[0] for path in half.iterdir()] == ["private"]


def test_a_writer_that_hangs_is_replaced(msrun: Launcher) -> None:
    job = start(msrun, "0=hang", "1=hang", "2=late", ranks=4, options=("--dump-timeout=1",))
    kill(job, 3)
    assert job.wait().code == 1
    # where two got stuck the disk may be to blame: the third writes somewhere else
    assert writers(saved(job.folder / "dumps" / STEP_5)) == {2}


def test_a_rank_that_differs_is_named_and_outvoted(msrun: Launcher) -> None:
    job = start(msrun, "1=odd", ranks=4)
    kill(job, 3)
    ended = job.wait()
    found = saved(msrun.tmp / "ckpt" / STEP_5)
    assert found.odd == (1,)
    assert found.digest == "same"
    assert writers(found) < {0, 2}
    assert "rank 1 differs from the other replicas at step 5" in ended.err


def test_two_that_differ_are_both_kept(msrun: Launcher) -> None:
    job = start(msrun, "1=odd")
    kill(job, 2)
    ended = job.wait()
    found = saved(msrun.tmp / "ckpt" / STEP_5)
    variants = {shard.rank: shard.variant for shard in found.shards if shard.kind == "replicated"}
    assert sorted(variants) == [0, 1]
    assert sorted(variants.values()) == [0, 1]
    assert "the replicas disagree at step 5" in ended.err


@pytest.mark.parametrize("why", ["the rank says so", "no folder"])
def test_a_place_that_cannot_be_written_is_followed_by_the_fallback(
    msrun: Launcher, why: str
) -> None:
    how = ("all=full",) if why == "the rank says so" else ()
    job = start(msrun, *how)
    if why == "no folder":
        os.rmdir(msrun.tmp / "ckpt")
        (msrun.tmp / "ckpt").write_text("mine")
    kill(job, 2)
    ended = job.wait()
    folder = job.folder / "dumps" / STEP_5
    saved(folder)
    assert f": {folder} (" in ended.err  # and why it is there
    assert not (msrun.tmp / "ckpt" / STEP_5).exists()
    if why == "the rank says so":
        assert os.listdir(msrun.tmp / "ckpt") == []


def test_a_vanished_folder_is_made_again(msrun: Launcher) -> None:
    job = start(msrun)
    os.rmdir(msrun.tmp / "ckpt")
    kill(job, 2)
    job.wait()
    saved(msrun.tmp / "ckpt" / STEP_5)


def test_a_rank_that_leaves_during_a_dump_is_held_until_it_is_committed(msrun: Launcher) -> None:
    job = start(msrun, "0=leave", "1=wait", "0=wait")
    kill(job, 2)
    job.await_seen("SaveRanks")
    time.sleep(0.2)  # nothing can be awaited here: the claim is that nothing happens
    assert "released" not in job.logs()["worker_0.log"]
    (msrun.tmp / "go").touch()
    assert job.wait().code == 1
    saved(msrun.tmp / "ckpt" / STEP_5)
    log = job.logs()["worker_0.log"]
    assert "released" not in log or f"['{STEP_5}']" in log


def test_a_rank_that_leaves_while_all_is_well_is_let_go_at_once(msrun: Launcher) -> None:
    (msrun.tmp / "ckpt").mkdir()
    job = msrun.start("--nproc-per-node=2", WORKERS / "guarded.py", "ckpt", "all=ends")
    assert job.wait().code == 0
    assert job.seen("FreezeRanks") == []


def test_a_raised_rank_is_held_saved_and_counts_as_failed_by_itself(msrun: Launcher) -> None:
    job = start(msrun, "1=raise")
    (msrun.tmp / "go").touch()
    ended = job.wait()
    assert ended.code == 1
    saved(msrun.tmp / "ckpt" / STEP_5)
    log = job.logs()["worker_1.log"]
    assert f"['{STEP_5}']" in log.partition("released")[2]
    (raised,) = job.seen("Raised")
    assert raised["error"] == "ValueError: mine"
    assert ended.err.splitlines()[0].startswith("step 5 saved") or "rank 1" in ended.err
    assert "rank 1 on " in ended.err
    assert "ValueError: mine" in ended.err
    assert job.status()["workers"][1]["state"] == "failed"


def test_a_child_that_says_hello_too_changes_nothing(msrun: Launcher) -> None:
    job = start(msrun, "0=child")
    job.await_lines("the child was told None")
    kill(job, 2)
    job.wait()
    assert len(job.seen("Registered")) == 3
    assert job.seen("RankUnreachable") == []
    saved(msrun.tmp / "ckpt" / STEP_5)


@pytest.mark.parametrize("how", ["garbage", "close", "torn"])
def test_a_rank_that_cannot_be_asked_is_done_without(msrun: Launcher, how: str) -> None:
    job = start(msrun, f"0={how}")
    kill(job, 2)
    ended = job.wait()
    assert ended.code == 1
    assert writers(saved(msrun.tmp / "ckpt" / STEP_5)) == {1}
    assert "Traceback" not in ended.err
    assert (how == "torn") == (job.seen("RankUnreachable") == [])


def test_a_dead_ranks_line_is_not_called_unreachable(msrun: Launcher) -> None:
    job = start(msrun)
    kill(job, 1)
    job.wait()
    assert [one for one in job.seen("RankUnreachable") if one["rank"] == 1] == []


def test_when_all_are_torn_the_reason_says_so_and_nothing_is_left(msrun: Launcher) -> None:
    job = start(msrun, "all=torn")
    kill(job, 2)
    ended = job.wait()
    assert ended.code == 1
    assert os.listdir(msrun.tmp / "ckpt") == []
    assert "an update was under way" in (job.folder / "scheduler.log").read_text()


def test_a_stop_during_a_dump_lets_it_finish(msrun: Launcher) -> None:
    job = start(msrun, "all=wait", options=("--max-restarts=3",))
    kill(job, 2)
    job.await_state("dumping")
    job.signal(signal.SIGTERM)
    job.await_seen("StopRequested")
    (msrun.tmp / "go").touch()
    ended = job.wait()
    assert ended.code == 143
    saved(msrun.tmp / "ckpt" / STEP_5)
    assert job.status()["attempt"] == 0


def test_a_second_stop_during_a_dump_means_now_and_leaves_nothing_half(msrun: Launcher) -> None:
    job = start(msrun, "all=wait")
    kill(job, 2)
    job.await_state("dumping")
    job.signal(signal.SIGTERM)
    job.await_seen("StopRequested")
    asked_s = time.monotonic()
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 143
    assert time.monotonic() - asked_s < DumpSpec().stall_s  # else the dump's own deadline ended it
    poll(lambda: os.listdir(msrun.tmp / "ckpt") == [])


def test_the_last_good_checkpoint_is_not_touched(msrun: Launcher) -> None:
    old = msrun.tmp / "ckpt" / "tft_saved_checkpoints-step_4"
    old.mkdir(parents=True)
    (old / "manifest.json").write_text("whatever")
    before = old.stat()
    job = start(msrun, "all=full")
    kill(job, 2)
    job.wait()
    assert (old / "manifest.json").read_text() == "whatever"
    assert old.stat().st_mtime_ns == before.st_mtime_ns


def test_guarded_ranks_outlive_a_kill_of_msrun_and_their_children_go_with_them(
    msrun: Launcher,
) -> None:
    (msrun.tmp / "stay").touch()
    job = start(msrun, "all=alone", "0=child", "2=close")
    job.await_lines("the child was told None")
    pids = job.pids()
    job.signal(signal.SIGKILL)
    job.await_lines("the line is closed", 3)
    time.sleep(0.3)  # nothing can be awaited here: the claim is that nothing happens
    assert set(pids.values()) <= set(msrun.marked())
    assert any("child" in command for command in msrun.marked().values())
    (msrun.tmp / "stay").unlink()
    job.await_lines("leaves", 3)
    poll(lambda: not msrun.marked(), within_s=Timeouts().grace_s)


def test_a_new_forkserver_knows_whom_to_spare(msrun: Launcher) -> None:
    (msrun.tmp / "stay").touch()
    job = start(msrun, "all=alone")
    (old,) = job.forkservers()
    os.kill(old, signal.SIGKILL)
    job.await_seen("ForkserverStarted")
    pids = job.pids()
    job.signal(signal.SIGKILL)
    job.await_lines("the line is closed", 3)
    time.sleep(0.3)  # nothing can be awaited here: the claim is that nothing happens
    assert set(pids.values()) <= set(msrun.marked())
    (msrun.tmp / "stay").unlink()
    poll(lambda: not msrun.marked(), within_s=Timeouts().grace_s)


def test_a_warm_worker_is_told_that_it_resumes(msrun: Launcher) -> None:
    (msrun.tmp / "light.py").write_text("")
    paths = f"{msrun.tmp}:{msrun.env()['PYTHONPATH']}"
    options = ("--preload=light", "--max-restarts=1")
    job = start(msrun, "rest=x", options=options, PYTHONPATH=paths)
    kill(job, 1)
    assert job.wait().code == 0
    assert "workers start warm" in (job.folder / "scheduler.log").read_text()
    for log in (job.folder / f"worker_{rank}.log" for rank in range(3)):
        assert "arguments ['ckpt', 'rest=x', '--is_recover=1']\n" in log.read_text()


def test_more_ranks_than_msrun_may_have_files_and_they_keep_their_limit(msrun: Launcher) -> None:
    (msrun.tmp / "ckpt").mkdir()
    words = ("--nproc-per-node=40", "--log_dir=logs", WORKERS / "guarded.py", "ckpt", "0=raise")
    (msrun.tmp / "go").touch()
    ended = shell(msrun, "ulimit -S -n 80", *words)
    assert ended.code == 1
    assert saved(msrun.tmp / "ckpt" / STEP_5).world_size == 40
    logs = [path.read_text() for path in (msrun.tmp / "logs").glob("worker_*.log")]
    assert len(logs) == 40
    assert {log.partition("files ")[2].split()[0] for log in logs if "files" in log} == {"80"}


def test_ranks_without_state_do_not_outlive_a_kill_of_msrun(msrun: Launcher) -> None:
    job = start(msrun, "all=alone", "1=ends", ready=2)
    (msrun.tmp / "stay").touch()
    job.signal(signal.SIGKILL)
    job.await_lines("the line is closed", 2)
    (msrun.tmp / "stay").unlink()
    poll(lambda: not msrun.marked(), within_s=Timeouts().grace_s)
