"""All ways to ask for a graceful exit, and to ask for it wrongly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.graceful_jobs import STEP_6, check_graceful, start
from support.jobs import WORKERS, Launcher, poll, refused

# --- a file asks


def ask(path: Path, content: str = '{"GracefulExit": 1}') -> None:
    path.write_text(content)


@pytest.mark.parametrize("how", ["--graceful_exit_file=exit.json", "file"])
def test_a_file_asks_and_does_not_stop_the_next_run(msrun: Launcher, how: str) -> None:
    path = msrun.tmp / "exit.json"
    ask(path, '{"GracefulExit": 0}')
    options, words = ((how,), ()) if how.startswith("-") else ((), (f"all={how}",))
    job = start(msrun, *words, options=options)
    ask(path)
    check_graceful(msrun, job, job.wait(), f"{path} asks for it")
    again = start(msrun, *words, options=options, log_dir=msrun.tmp / "again")
    ask(path)
    ended = again.wait()
    assert ended.code == 0
    assert (
        f"{path} has asked for a graceful exit since before this run began, which is ignored"
        in ended.err
    )
    assert len(again.seen("ExitRequestedByFile")) == 1


def test_a_file_that_is_not_changed_asks_for_nothing(msrun: Launcher) -> None:
    path = msrun.tmp / "exit.json"
    ask(path)
    job = start(msrun, "all=file")
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(1.5)
    assert not job.seen("ExitRequestedByFile")
    os.replace(path, msrun.tmp / "moved.json")
    ask(path)
    assert job.wait().code == 0


def test_nonsense_is_said_once_and_asks_for_nothing(msrun: Launcher) -> None:
    path = msrun.tmp / "exit.json"
    job = start(msrun, options=("--graceful_exit_file", str(path)))
    for count in range(3):
        ask(path, "{" * (count + 1))
        with pytest.raises(subprocess.TimeoutExpired):
            job.process.wait(1.2)
    ask(path)
    ended = job.wait()
    assert ended.code == 0
    assert ended.err.count("asks for nothing: it is no JSON") == 1


def test_a_file_asks_a_script_without_hooks(msrun: Launcher) -> None:
    job = msrun.start("--graceful_exit_file=exit.json", "--nproc-per-node=2", WORKERS / "wait.py")
    job.await_state("running")
    poll(lambda: job.process.poll() is not None or ask(msrun.tmp / "exit.json"))
    ended = job.wait()
    assert ended.code == 143
    assert "exit.json asks for it" in ended.err


# --- other signals


def test_a_graceful_signal_asks_and_reaches_no_worker(msrun: Launcher) -> None:
    job = start(msrun, options=("--graceful_signals=USR1,12",))
    job.signal(signal.SIGUSR1)
    check_graceful(msrun, job, job.wait(), "msrun received SIGUSR1")
    assert [one["after_s"] for one in job.seen("SetDeadline") if one["state"] == "holding"] == [585]


def test_a_graceful_signal_stops_a_script_without_hooks_by_sigterm(msrun: Launcher) -> None:
    job = msrun.start("--graceful_signals=SIGUSR2", "--nproc-per-node=2", WORKERS / "wait.py")
    job.await_state("running")
    job.signal(signal.SIGUSR2)
    assert job.wait().code == 128 + signal.SIGUSR2
    assert [one["signum"] for one in job.seen("SignalRanks")] == [signal.SIGTERM]


def test_a_signal_to_one_worker_asks_for_all(msrun: Launcher) -> None:
    job = start(msrun, "1=catches")
    os.kill(job.pids()[1], signal.SIGTERM)
    check_graceful(msrun, job, job.wait(), "rank 1 received SIGTERM")


def test_a_signal_to_everybody_asks_once(msrun: Launcher) -> None:
    job = start(msrun, "all=catches")
    for pid in (*job.pids().values(), job.pid):
        os.kill(pid, signal.SIGTERM)
    ended = job.wait()
    first = next(one for one in job.events() if one["event"] in {"StopRequested", "ExitRequested"})
    why = first["why"] or "msrun received SIGTERM"  # whoever was quicker
    check_graceful(msrun, job, ended, why)


def test_who_catches_the_signal_to_stop_is_dismissed(msrun: Launcher) -> None:
    job = start(msrun, "1=catches", "0=falls", "2=long")
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 143
    job.await_lines("dismissed: rank 1 caught the signal, but the job is stopping")
    assert [one["ranks"] for one in job.seen("Dismiss")] == [[1]]


def test_who_catches_the_signal_that_makes_room_for_a_restart_asks_for_nothing(
    msrun: Launcher,
) -> None:
    job = start(msrun, "all=catches", options=("--max-restarts=1",))
    os.kill(job.pids()[1], signal.SIGKILL)
    ended = job.wait()
    assert ended.code == 0, ended.err
    assert job.status()["attempt"] == 1
    assert {rank for one in job.seen("Dismiss") for rank in one["ranks"]} == {0, 2}


# --- msrun stop


def test_stop_is_graceful(msrun: Launcher) -> None:
    job = start(msrun)
    done = msrun.command("stop")
    assert done.code == 0, done.err
    assert " (up to 2 min" in done.out
    check_graceful(msrun, job, job.wait(), "msrun received SIGTERM")


@pytest.mark.parametrize(
    ("words", "held_s", "why"),
    [
        (("--graceful",), 585, "msrun stop --graceful"),
        (("--graceful", "--grace=6"), 4, "msrun stop --graceful"),
        (("--grace", "3"), 2, "msrun stop"),
    ],
)
def test_stop_says_how_long_it_waits(
    msrun: Launcher, words: tuple, held_s: float, why: str
) -> None:
    job = start(msrun)
    assert msrun.command("stop", *words).code == 0
    check_graceful(msrun, job, job.wait(), why)
    (held,) = [one for one in job.seen("SetDeadline") if one["state"] == "holding"]
    assert held["after_s"] == pytest.approx(held_s)


def test_stop_now_does_not_wait_for_anything(msrun: Launcher) -> None:
    job = start(msrun, "all=long")
    job.signal(signal.SIGTERM)
    job.await_state("holding")
    done = msrun.command("stop", "--now")
    assert "killing run " in done.out
    assert job.wait().code == 143
    assert [one["signum"] for one in job.seen("SignalRanks")] == [signal.SIGKILL]
    assert not list((msrun.tmp / "ckpt").iterdir())


def test_a_note_counts_for_one_signal(msrun: Launcher) -> None:
    job = start(msrun, "1=long")
    done = msrun.command("stop", "--graceful", "--timeout=0.5")
    assert done.code == 1
    (record,) = (msrun.tmp / "state" / "msrun" / "runs").iterdir()
    assert [path.name for path in record.iterdir()] == ["record.json"]
    job.signal(signal.SIGTERM)
    assert "msrun received SIGTERM again" in job.wait().err


@pytest.mark.parametrize("words", [("--now", "--graceful"), ("--now", "--grace=3"), ("--grace=0",)])
def test_wrong_words_for_stop(msrun: Launcher, words: tuple) -> None:
    done = msrun.command("stop", *words)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--graceful_signals=KILL", "no program can catch KILL"),
        ("--graceful_signals=SIGUSR1,SIGSTOP", "no program can catch SIGSTOP"),
        ("--graceful_signals=SIGFOO", "SIGFOO is not a signal of this system"),
        ("--graceful_signals=0", "0 is not a signal"),
        ("--graceful_signals=99", "99 is not a signal"),
        ("--graceful_signals=CHLD", "msrun needs CHLD for itself"),
        ("--graceful_signals=11", "11 means that a program crashed"),
        ("--graceful_exit_file=/", "is a folder"),
        ("--grace=0", "--grace=0 must be above 0"),
    ],
)
def test_wrong_options(msrun: Launcher, option: str, words: str) -> None:
    assert words in refused(msrun.run(option, WORKERS / "wait.py"))


# --- periodic checkpoints


def test_the_folder_of_periodic_checkpoints_is_remembered(msrun: Launcher) -> None:
    (msrun.tmp / "periodic").mkdir()
    job = start(msrun, "all=periodic")
    (record,) = (msrun.tmp / "state" / "msrun" / "runs").iterdir()
    poll(lambda: len(json.loads((record / "record.json").read_text())["checkpoints"]) == 2)
    job.signal(signal.SIGTERM)
    assert job.wait().code == 0
    assert json.loads((record / "record.json").read_text())["checkpoints"] == [
        str(msrun.tmp / "ckpt"),
        str(msrun.tmp / "periodic"),
    ]


def test_a_script_that_asks_finds_its_periodic_checkpoint(msrun: Launcher) -> None:
    job = start(msrun)
    job.signal(signal.SIGTERM)
    assert job.wait().code == 0
    os.rename(msrun.tmp / "ckpt", msrun.tmp / "periodic")
    again = start(msrun, "all=periodic", "all=asks", log_dir=msrun.tmp / "again")
    again.await_lines(f"periodic/{STEP_6}", 3)
    again.signal(signal.SIGTERM)
    assert again.wait().code == 0
