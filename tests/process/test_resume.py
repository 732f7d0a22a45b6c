"""`msrun --resume` starts a recorded run again from the newest whole checkpoint of its folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from support.checkpoints import OTHER, flipped, saved
from support.jobs import WORKERS, Ended, Launcher, poll, refused

from agent.records import run_record
from agent.records.run_record import Record

SET = {"MODE": "old", "API_TOKEN": "secret"}  # as when the run began


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a script."""
    folder = tmp_path / "home"
    folder.mkdir()
    shutil.copy(WORKERS / "tell.py", folder / "train.py")
    return folder


def call(msrun: Launcher, folder: Path, *args: object, **environ: str) -> Ended:
    """`msrun ARGS` in a folder, to its end."""
    return msrun.command(*args, cwd=folder, PWD=str(folder), **environ)


def told(folder: Path) -> list[dict]:
    """What the ranks of the runs in a folder told; then it is forgotten."""
    path = folder / "told.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    return sorted(lines, key=lambda line: line["environ"]["RANK"])


def newest(msrun: Launcher) -> Record:
    return next(run_record.records(msrun.env()))


def failed(msrun: Launcher, home: Path, *args: object, **environ: str) -> Record:
    """A run that failed, and is remembered to save into ``ckpt``."""
    words = args or ("--worker_num=2", "--log_dir=logs", "train.py", "--lr", "1")
    environ = {
        "MODE": "old",
        "OMP_NUM_THREADS": "7",
        "API_TOKEN": "secret",
        "LEAVE": "3",
        **environ,
    }
    assert call(msrun, home, *words, **environ).code == 1
    told(home)
    record = newest(msrun)
    return run_record.add_checkpoints(
        run_record.writable_folder(msrun.env()), record, str(home / "ckpt")
    )


def resuming(ended: Ended) -> str:
    """The one line that says what is gone on from."""
    (line,) = (line for line in ended.err.splitlines() if "resuming" in line)
    return line.removeprefix("msrun: ")


def test_a_failed_run_goes_on_with_its_command_its_variables_and_its_folders(msrun, home):
    record = failed(msrun, home)
    folder = saved(home / "ckpt", step=412, run=record.record_id)
    ended = call(msrun, home, "--resume", LEAVE="0")
    assert ended.code == 0, ended.err
    assert resuming(ended) == f"resuming step 412 of run {record.record_id} from {folder}"
    first, second = told(home)
    assert first["argv"] == second["argv"] == ["--lr", "1"]  # the script names no is_recover
    assert first["environ"] == {"MODE": None, "RANK": "0", "API_TOKEN": None}
    assert first["threads"] == "7"
    warned = "msrun: warning: the run was started with API_TOKEN, MODE, which are not set now: "
    assert any(line.startswith(warned) for line in ended.err.splitlines())
    assert (first["world"], first["restarts"]) == ("2", "0")
    again = newest(msrun)
    assert again.argv[1:] == ("--worker_num=2", "--log_dir=logs", "train.py", "--lr", "1")
    assert again.lineage == (record.record_id,)
    assert again.checkpoints == (str(home / "ckpt"),)
    assert (home / "logs" / "earlier" / record.record_id / "status.json").exists()
    starts = [
        json.loads(line) for line in (home / "logs" / "events.jsonl").read_text().splitlines()
    ]
    assert next(one["resume"] for one in starts if one["event"] == "StartAttempt") == str(folder)
    said = (home / "logs" / "scheduler.log").read_text()
    assert "timeouts: freeze 5 s < update grace 10 s <" in said


def test_flags_given_now_win_and_the_size_may_change(msrun, home):
    record = failed(msrun, home)
    saved(home / "ckpt", run=record.record_id)
    args = ("--resume", record.record_id[:-2], "--nproc-per-node=3", "--recover_arg=--go", "-v")
    ended = call(msrun, home, *args, LEAVE="0", MODE="new")
    assert ended.code == 0, ended.err
    assert "msrun: timeouts: freeze 5 s < " in ended.err
    ranks = told(home)
    assert [rank["world"] for rank in ranks] == ["3"] * 3
    assert ranks[0]["argv"] == ["--lr", "1", "--go"]
    assert ranks[0]["environ"]["MODE"] == "new"
    assert "--nproc-per-node=3" in newest(msrun).argv


def test_a_run_is_gone_on_with_from_anywhere_in_its_own_folder(msrun, home, tmp_path):
    record = failed(msrun, home)
    saved(home / "ckpt", run=record.record_id)
    ended = call(msrun, tmp_path, "--resume", record.record_id, LEAVE="4")
    assert ended.code == 1
    assert {rank["cwd"] for rank in told(home)} == {str(home)}
    assert (
        ended.err.splitlines()[-1] == f"msrun: to resume: msrun --resume {newest(msrun).record_id}"
    )


def test_a_run_that_went_on_and_failed_says_how_to_go_on_and_does(msrun, home):
    record = failed(msrun, home, "--worker_num=2", "train.py")
    folder = saved(home / "ckpt", step=5, run=record.record_id)
    ended = call(msrun, home, "--resume", "ckpt", LEAVE="4")
    assert ended.code == 1
    assert ended.err.splitlines()[-2:] == [
        f"msrun: saved: step 5, 2 ranks, {folder}",
        "msrun: to resume: msrun --resume",
    ]
    second = newest(msrun)
    report = json.loads((Path(second.log_dir) / "failure.json").read_text())
    assert report["saved"]["path"] == str(folder)
    assert report["saved"]["command"] == "msrun --resume"
    third = call(msrun, home, "--resume", LEAVE="0")
    assert third.code == 0, third.err
    assert resuming(third).startswith(f"resuming step 5 of run {second.record_id} from ")
    assert newest(msrun).lineage == (second.record_id, record.record_id)
    said = refused(call(msrun, home, "--resume"))
    assert (
        "finished, there is nothing to resume; to resume it anyway, from step 5: msrun --resume "
        in said
    )
    typed = said.rpartition("msrun ")[2].split()
    assert call(msrun, home, *typed, LEAVE="0").code == 0


def test_damaged_checkpoints_are_named_and_the_next_older_is_taken(msrun, home):
    record = failed(msrun, home)
    good = saved(home / "ckpt", step=1, run=record.record_id)
    bad = saved(home / "ckpt", step=2, run=record.record_id)
    flipped(bad / OTHER)
    half = saved(home / "ckpt", "tft_saved_checkpoints-step_3_tmp", step=3)
    ended = call(msrun, home, "--resume", LEAVE="0", **SET)
    assert ended.code == 0
    assert ended.err.splitlines()[:3] == [
        f"msrun: {half} is skipped: it is unfinished",
        f"msrun: {bad} is skipped: {OTHER} was altered (its checksum differs)",
        f"msrun: resuming step 1 of run {record.record_id} from {good}",
    ]


def test_without_a_whole_checkpoint_nothing_is_started(msrun, home):
    record = failed(msrun, home)
    before = sorted(path.name for path in (home / "logs").iterdir())
    flipped(saved(home / "ckpt", run=record.record_id) / OTHER)
    ended = call(msrun, home, "--resume", LEAVE="0", **SET)
    assert (ended.code, ended.out) == (2, "")
    *skipped, last = ended.err.splitlines()
    assert len(skipped) == 1 and "was altered" in skipped[0]
    assert last.startswith(f"msrun: error: there is no complete checkpoint in {home}/ckpt")
    assert told(home) == []
    assert sorted(path.name for path in (home / "logs").iterdir()) == before


def test_a_run_that_saved_nothing_resumes_from_no_other_run(msrun, home):
    """Two runs of other arguments share a folder, and the second dies before it has saved."""
    first = failed(msrun, home)
    folder = saved(home / "ckpt", step=141, run=first.record_id)
    second = failed(msrun, home, "--worker_num=2", "--log_dir=other", "train.py", "--lr", "2")
    ended = call(msrun, home, "--resume", LEAVE="0", **SET)
    assert (ended.code, ended.out) == (2, "")
    said = ended.err.splitlines()[-1]
    assert said.startswith(f"msrun: error: run {second.record_id} has saved no checkpoint")
    assert told(home) == []
    shown = call(msrun, home, "status", second.record_id).out
    assert "step 141" not in shown
    assert "--resume" not in shown
    line = said.partition("to resume from that one: ")[2]  # it is not refused
    assert call(msrun, home, *line.split()[1:], LEAVE="0", **SET).code == 0
    assert told(home)[0]["argv"][:2] == ["--lr", "2"]
    assert resuming(call(msrun, home, "--resume", first.record_id, LEAVE="0", **SET)) == (
        f"resuming step 141 of run {first.record_id} from {folder}"
    )


def test_a_script_that_is_given_is_run_from_the_newest_run_of_it(msrun, home):
    with (home / "train.py").open("a") as script:
        script.write('assert "--is_recover=1" in sys.argv')  # now it names it
    record = failed(msrun, home)
    folder = saved(home / "ckpt", run=record.record_id)
    for args in (["--resume"], ["--is_recover=1"], ["--resume", "ckpt"], [f"--resume={folder}"]):
        ended = call(msrun, home, *args, "--log_dir=new", "train.py", "--lr", "2", LEAVE="0")
        assert ended.code == 0, ended.err
        (rank,) = told(home)
        assert rank["argv"] == ["--lr", "2", "--is_recover=1"]
        assert rank["environ"]["MODE"] is None
        assert newest(msrun).argv[1:] == ("--log_dir=new", "train.py", "--lr", "2")


def test_after_the_script_is_recover_is_the_script_s_own(msrun, home):
    assert call(msrun, home, "--log_dir=logs", "train.py", "--is_recover=1").code == 0
    (rank,) = told(home)
    assert rank["argv"] == ["--is_recover=1"]


def test_a_run_that_lives_is_not_started_twice_and_a_killed_one_is(msrun, home):
    job = msrun.start(
        "--worker_num=1",
        WORKERS / "speak_and_wait.py",
        home / "go",
        cwd=home,
        log_dir=home / "logs",
    )
    job.await_state("running")
    record = newest(msrun)
    record = run_record.add_checkpoints(
        run_record.writable_folder(msrun.env()), record, str(home / "ckpt")
    )
    folder = saved(home / "ckpt", run=record.record_id)
    assert refused(call(msrun, home, "--resume")).startswith(
        f"run {record.record_id} is alive (msrun pid {job.pid})"
    )
    os.kill(job.pid, signal.SIGKILL)
    job.process.wait()
    poll(lambda: not msrun.marked())
    (home / "go").touch()
    ended = call(msrun, home, "--resume")
    assert ended.code == 0, ended.err
    assert resuming(ended).endswith(str(folder))


def test_a_dry_run_shows_what_would_go_on(msrun, home):
    record = failed(msrun, home)
    saved(home / "ckpt", run=record.record_id)
    ended = call(msrun, home, "--resume", "--dry_run")
    assert ended.code == 0
    assert resuming(ended).startswith("resuming step 7 ")
    assert "train.py --lr 1" in ended.out
    assert told(home) == []
