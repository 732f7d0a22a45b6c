"""What a hostile review of the agent's dump broke: liars, floods, full and stuck disks, two at once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.checkpoints import newest, saved
from support.jobs import WORKERS, Job, Launcher, poll
from support.policies import policy
from support.stand_ins import services

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job as Known
from agent.controller.states import JobState
from agent.dump.executor import DumpExecutor
from agent.hooks import rank_links
from agent.hooks.listener import name_of, open_listener
from agent.hooks.status_pages import StatusPages
from agent.machine import file_thread
from agent.records import run_record
from agent.records.journal import Journal
from agent.records.run_record import remembered, unrecorded
from agent.spec.job_spec import DumpSpec, JobSpec, Program, ProgramKind, UsageError
from worker_hooks.contract import protocol, wire
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.storage import commit, manifest

STEP_5 = "tft_saved_checkpoints-step_5"


def start(msrun: Launcher, *how: str, ranks: int = 3, options: tuple = ()) -> Job:
    """Ranks that committed five steps and wait."""
    (msrun.tmp / "ckpt").mkdir(exist_ok=True)
    job = msrun.start(f"--nproc-per-node={ranks}", *options, WORKERS / "guarded.py", "ckpt", *how)
    await_registered(job, ranks)
    return job


def await_registered(job: Job, ranks: int) -> None:
    job.await_state("running")
    job.await_seen("Registered", ranks)


def kill(job: Job, rank: int) -> None:
    os.kill(job.pids()[rank], signal.SIGKILL)


# --- going on -----------------------------------------------------------------------------------


@pytest.fixture
def again(msrun: Launcher) -> list[str]:
    """A run that failed with step 5 saved; the words that go on from it."""
    job = start(msrun)
    kill(job, 2)
    assert job.wait().err.splitlines()[-1] == "msrun: to resume: msrun --resume"
    return ["--resume"]


def test_a_resumed_run_knows_what_its_checkpoint_holds(msrun: Launcher, again: list[str]) -> None:
    folder = msrun.tmp / "ckpt" / STEP_5
    before = folder.stat().st_ino
    job = msrun.start(*again, log_dir=msrun.tmp / "more")
    await_registered(job, 3)
    kill(job, 1)
    ended = job.wait()
    assert ended.code == 1
    assert "step -1" not in ended.err
    assert "lost: " not in ended.err
    assert ended.err.splitlines()[-2:] == [
        f"msrun: saved: step 5, 3 ranks, {folder}",
        "msrun: to resume: msrun --resume",
    ]
    assert f"step 5 is saved in {folder}" in job.seen("Finish")[0]["reason"]
    assert os.listdir(msrun.tmp / "ckpt") == [STEP_5]  # the same is not saved once more
    assert folder.stat().st_ino == before


def test_of_two_resumes_at_once_one_is_refused(msrun: Launcher, again: list[str]) -> None:
    jobs = [msrun.start(*again, log_dir=msrun.tmp / name) for name in ("a", "b")]
    poll(lambda: any(job.process.poll() is not None for job in jobs))
    (loser,) = (job for job in jobs if job.process.poll() is not None)
    (winner,) = (job for job in jobs if job is not loser)
    ended = loser.wait()
    assert ended.code == 2
    assert re.search(r"(is being|has been) resumed already", ended.err.splitlines()[-1])
    await_registered(winner, 3)
    winner.signal(signal.SIGTERM)
    assert winner.wait().code == 0


def test_the_line_to_type_works_without_a_record(msrun: Launcher) -> None:
    job = start(msrun, ranks=2)
    (own,) = (msrun.tmp / "state" / "msrun" / "runs").iterdir()
    shutil.rmtree(own)
    kill(job, 1)
    ended = job.wait()
    assert ended.code == 1
    *_, kept, line = ended.err.splitlines()
    assert kept == f"msrun: saved: step 5, 2 ranks, {msrun.tmp}/ckpt/{STEP_5}"
    program, *words = shlex.split(line.removeprefix("msrun: to resume: "))
    assert program == "msrun"
    again = msrun.start(*words)
    await_registered(again, 2)
    again.await_lines(f"{STEP_5}'", 2)
    again.signal(signal.SIGTERM)
    assert again.wait().code == 0


def test_a_run_is_held_by_one_and_nobody_holds_what_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "r1").mkdir()
    held = run_record.claim(tmp_path, "r1")
    assert held is not None
    with pytest.raises(UsageError, match="run r1 is being resumed already"):
        run_record.claim(tmp_path, "r1")
    os.close(held)
    held = run_record.claim(tmp_path, "r1")
    assert held is not None
    os.close(held)
    for odd in ("r2", "", "..", "\ud800", "a\0b"):
        claimed = run_record.claim(tmp_path, odd)
        if claimed is not None:  # a folder of ours, whatever it is called
            os.close(claimed)


@pytest.mark.parametrize("at", [10**400, float("nan"), float("inf"), "1", True, None])
def test_a_manifest_of_no_time_is_damaged(tmp_path: Path, at: object) -> None:
    folder = saved(tmp_path)
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "saved_at": at}))
    with pytest.raises(ValueError, match=r"saved_at=.* cannot be"):
        manifest.read(folder)


@pytest.mark.parametrize(
    "name", ["SSHPASS", "MYSQL_PWD", "GITHUB_PAT", "AUTH", "DB_DSN", "HF_TOKEN"]
)
def test_more_names_of_secrets(name: str) -> None:
    assert remembered({name: "s", f"TORCH_{name}": "s"}) == {}


@pytest.mark.parametrize("name", ["TOKENIZER_PATH", "MAX_TOKENS", "AUTHOR", "PATTERN", "PASSES"])
def test_what_only_looks_like_a_secret_is_remembered_where_it_is_a_library_s(name: str) -> None:
    assert remembered({f"TORCH_{name}": "s"}) == {f"TORCH_{name}": "s"}
    assert remembered({name: "s"}) == {}
    assert unrecorded({name: "s"}) == (name,)


# --- the commit, failing anywhere -----------------------------------------------------------------

CALLS = ("open", "fsync", "rename", "replace", "mkdir", "symlink", "unlink", "rmdir", "write")


class FailingCalls:
    """The call number ``at`` fails, counted over all that change a file system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.count = 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self._of(getattr(os, name), at))

    def _of(self, call, at: int):
        def counted(*args, **kwargs):
            self.count += 1
            if self.count == at:
                raise OSError(28, os.strerror(28))
            return call(*args, **kwargs)

        return counted


@pytest.mark.parametrize("at", range(1, 40))
def test_a_commit_that_fails_anywhere_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    old = saved(tmp_path, step=7)
    draft = saved(tmp_path, old.name + "_tmp", step=7, saved_at=2.0)
    found = manifest.read(draft)
    (draft / "manifest.json").unlink()
    with monkeypatch.context() as patched:
        failing = FailingCalls(patched, at)
        try:
            commit.commit(DumpLayout(old), found)
        except OSError:
            is_new = False
        else:
            is_new = True
    assert failing.count < 40
    best = newest(tmp_path, lambda _: None)
    assert best is not None
    path, kept = best
    assert path == old  # under its own name, whichever it is
    assert manifest.verify(path, kept) == []
    if is_new:
        assert kept.saved_at == 2.0
        assert manifest.verify(old.with_name(f"{old.name}_replaced_1"), kept)


def test_what_vanishes_while_others_files_are_removed_does_not_fail_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = saved(tmp_path, "tft_saved_checkpoints-step_7_tmp")
    (draft / "rank_9").mkdir()
    (draft / "rank_9" / "half.safetensors").touch()
    found = manifest.read(draft)
    unlink = Path.unlink

    def raced(path: Path) -> None:
        unlink(path)
        unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", raced)
        commit.commit(DumpLayout(tmp_path / "tft_saved_checkpoints-step_7"), found)
    assert newest(tmp_path, pytest.fail) is not None


def test_folders_that_are_made_for_a_dump_are_made_to_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(commit, "fsync_folder", synced.append)
    commit.make_folder(DumpLayout.of_step(tmp_path / "a" / "b", 3))
    assert synced == [tmp_path, tmp_path / "a"]


def test_who_stops_a_job_that_saves_is_told_what_a_second_signal_does(msrun: Launcher) -> None:
    job = start(msrun, "all=wait")
    kill(job, 2)
    job.await_state("dumping")
    job.signal(signal.SIGINT)
    job.await_seen("StopRequested")
    (msrun.tmp / "go").touch()
    ended = job.wait()
    assert ended.code == 130
    assert "msrun: the state is saved before the stop; one more signal ends" in ended.err
    assert newest(msrun.tmp / "ckpt", pytest.fail) is not None


def test_a_dump_that_is_stuck_everywhere_ends_soon_whatever_the_ranks() -> None:
    ranks = range(200)
    job = Known(policy(tuple(ranks)))
    told = [
        ev.LaunchRequested(),
        *(ev.WorkerStarted(rank, 0, 100 + rank) for rank in ranks),
        *(protocol.Registered(rank, 0, 7) for rank in ranks),
        ev.WorkerExited(3, 0, -9, 7),
        *(protocol.Frozen(rank, 0, 1, 7, is_whole=True) for rank in ranks if rank != 3),
    ]
    for event in told:
        job = decide(job, event).job
    stalls = 0
    while job.state is JobState.DUMPING:
        decided = decide(job, ev.DeadlinePassed(JobState.DUMPING, 0))
        job, stalls = decided.job, stalls + 1
    assert stalls == 6  # two in each place, memory among them
    assert "ranks 0, 1, 2, 4, 5, 6, 7, 8, ... made no progress in 20 s" in job.now.outcome
    assert isinstance(decided.actions[0], do.AbandonDump)


# --- lines ----------------------------------------------------------------------------------------


def test_descriptors_beside_an_empty_packet_are_closed(tmp_path: Path) -> None:
    door = open_listener("x")
    loop, lost = asyncio.new_event_loop(), []
    lines = rank_links.RankLinks(door, (0,), Journal(None, print))
    lines.attach(loop, lambda _message, _fds: None, lambda rank, _pid: lost.append(rank))
    lines.begin(0)
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.connect("\0" + name_of(door))
        wire.send(rank, protocol.Hello(0, 0, os.getpid(), str(tmp_path), False))
        socket.send_fds(rank, [b""], [0, 0, 0])
        while not lost:
            loop.run_until_complete(asyncio.sleep(0.01))
    assert lost == [0]
    assert len(os.listdir("/proc/self/fd")) == before
    lines.close()
    loop.close()
    door.close()


# --- threads and disks that do not come -------------------------------------------------------------


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("no_threads")
def test_without_threads_the_files_are_written_all_the_same() -> None:
    done: list[object] = []
    one = file_thread.FileThread(lambda what, *args: what(*args))
    one.do(lambda: 1, done.append)
    one.do(lambda: 2, done.append)
    file_thread.side_by_side(done.append, [3, 4, 5])
    one.close(1)
    assert done == [1, 2, 3, 4, 5]


def test_what_is_stuck_is_left_behind_and_awaited_at_the_end() -> None:
    done: list[object] = []
    told = threading.Event()

    def call_soon(what, *args) -> None:
        what(*args)
        told.set()

    one, disk = file_thread.FileThread(call_soon), threading.Event()
    one.do(disk.wait, done.append)
    one.continue_in_new_thread()
    one.do(lambda: "new", done.append)
    assert told.wait(60)
    assert done == ["new"]
    disk.set()
    one.close(5)
    assert done == ["new", True]


def test_a_place_whose_disk_is_stuck_is_left_before_its_writers_are_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, posted, sent, later = threading.Event(), [], [], []
    make = commit.make_folder

    def stuck(layout: DumpLayout) -> None:
        if layout.folder.parent.name == "nfs":
            disk.wait()
        make(layout)

    monkeypatch.setattr(commit, "make_folder", stuck)

    class Lines:
        def send(self, rank: int, message: protocol.Message) -> None:
            sent.append((rank, message))

        def send_all(self, ranks: Sequence[int], message: protocol.Message) -> None:
            sent.extend((rank, message) for rank in ranks)

    class Places:
        lineage, resumed_step = (), 0

        def place(self, ranks: tuple[int, ...]) -> str:
            assert ranks
            return str(tmp_path / "nfs")

    one = file_thread.FileThread(lambda what, *args: what(*args))
    spec = JobSpec(
        Program("x", (), ProgramKind.SCRIPT, "python"), 2, "run", "id", dump=DumpSpec(stall_s=4.0)
    )
    saving = DumpExecutor(
        spec,
        tmp_path / "dumps",
        Lines(),
        StatusPages(),
        Places(),
        services(post=posted.append, files=one, call_later=lambda *args: later.append(args)),
    )
    saving.freeze(do.FreezeRanks((0,), 1, ""))
    saving.save(do.SaveRanks(1, 5, (0,), (), 0, ""))
    (after_s, check, dump) = later.pop()
    assert after_s == 2.0
    check(dump)
    (failed,) = posted
    assert (failed.rank, failed.is_place) == (0, True)
    assert failed.why == f"nothing can be written within 2 s: {tmp_path / 'nfs'}"
    assert not sent[1:]
    saving.save(do.SaveRanks(1, 5, (0,), (), 1, "", round=1))
    poll(lambda: sent[1:])  # another thread sends the order, perhaps before a deadline was needed
    assert sent[-1][1].folder == str(tmp_path / "dumps" / f"{STEP_5}.id_tmp")
    check(dump)  # too late to matter
    assert len(posted) == 1
    disk.set()
    saving.abandon()
    one.close(5)
    assert os.listdir(tmp_path / "dumps") == []
