"""A stop that is asked for: all come to one step, it is saved, they leave; real processes and kills."""

from __future__ import annotations

import re
import signal
import time

from support.graceful_jobs import LINE, STEP_6, check_graceful, saved, start
from support.jobs import WORKERS, Launcher, poll

from agent.spec.job_spec import Timeouts


def test_sigterm_brings_all_to_one_step(msrun: Launcher) -> None:
    job = start(msrun, "1=ahead")
    job.signal(signal.SIGTERM)
    ended = job.wait()
    check_graceful(msrun, job, ended, "msrun received SIGTERM", step=7)
    assert "which is then saved (at most 20 s); one more signal saves at once" in ended.err
    assert [one["step"] for one in job.seen("Frozen")] == [7] * 3


def test_a_run_that_left_gracefully_is_gone_on_with(msrun: Launcher) -> None:
    job = start(msrun)
    job.signal(signal.SIGTERM)
    assert job.wait().code == 0
    again = msrun.start("--resume", log_dir=msrun.tmp / "more")
    again.await_lines(f"{STEP_6}'", 3)
    again.signal(signal.SIGTERM)
    again.wait()


def test_an_interrupt_is_told_to_the_shell(msrun: Launcher) -> None:
    job = start(msrun)
    job.signal(signal.SIGINT)
    ended = job.wait()
    assert ended.code == 130
    assert "graceful exit: msrun received SIGINT, every rank exited with 0" in ended.err
    assert saved(msrun, 6).world_size == 3


def test_status_shows_what_is_waited_for(msrun: Launcher) -> None:
    job = start(msrun, "1=long")
    job.signal(signal.SIGTERM)
    job.await_state("holding")
    assert "holding" in msrun.command("status").out
    job.signal(signal.SIGTERM)
    job.wait()


# --- training ends meanwhile


def test_when_all_finish_meanwhile_the_job_succeeded(msrun: Launcher) -> None:
    job = start(msrun, "all=finishes")
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 0
    assert job.status()["state"] == "succeeded"
    assert not list((msrun.tmp / "ckpt").iterdir())


def test_who_finishes_meanwhile_is_let_go_and_the_others_agree(msrun: Launcher) -> None:
    job = start(msrun, "1=finishes", "0=ahead", options=("--grace=3",))
    asked_s = time.monotonic()
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert time.monotonic() - asked_s < Timeouts().exit_s  # --grace=3 bounds it, no other timeout
    assert (ended.code, job.status()["state"]) == (143, "stopped")
    assert "msrun: saved: step 5, " in ended.err


def test_who_is_done_before_the_step_of_the_others_is_let_go(msrun: Launcher) -> None:
    job = start(msrun, "1=done")
    (msrun.tmp / "go").touch()  # all are known by now
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 0, ended.err
    assert saved(msrun, 6).world_size == 3
    job.await_lines("released: the job is holding", 1)
    assert [log.count(LINE) for log in job.logs().values()].count(0) == 1


# --- what disturbs it


def test_a_death_makes_it_a_power_off_dump(msrun: Launcher) -> None:
    job = start(msrun, "2=falls", "0=long", "1=long")
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 143
    assert (
        "no graceful exit, rank 2 was killed by SIGKILL: what is complete is saved at once"
        in ended.err
    )
    reason = "stopped by SIGTERM, not gracefully: rank 2 was killed by SIGKILL"
    assert re.search(rf"{reason}\nmsrun: training was .*\nmsrun: saved: step 5, ", ended.err)
    assert ended.err.splitlines()[-1] == "msrun: to resume: msrun --resume"
    assert (
        saved(msrun, 5).reason
        == "graceful exit: msrun received SIGTERM, but rank 2 was killed by SIGKILL"
    )
    assert LINE not in "".join(job.logs().values())


def test_the_second_signal_saves_at_once(msrun: Launcher) -> None:
    job = start(msrun, "1=long")
    job.signal(signal.SIGTERM)
    job.await_seen("Frozen", 2)
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 143
    assert (
        "no graceful exit, msrun received SIGTERM again: what is complete is saved at once"
        in ended.err
    )
    assert saved(msrun, 5).world_size == 3


def test_the_third_signal_kills(msrun: Launcher) -> None:
    job = start(msrun, "all=long", "all=wait", "all=ignores")
    for count in (1, 2):
        job.signal(signal.SIGTERM)
        job.await_seen("StopRequested", count)
    job.await_seen("SaveRanks")
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 143
    assert [one["signum"] for one in job.seen("SignalRanks")] == [signal.SIGKILL]
    assert not any(name.name == STEP_6 for name in (msrun.tmp / "ckpt").iterdir())


def test_too_long_a_step_is_not_waited_for(msrun: Launcher) -> None:
    job = start(msrun, "1=long", options=("--grace=1.5",))
    began_s = time.monotonic()
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert 1.0 <= time.monotonic() - began_s < Timeouts().grace_s
    assert ended.code == 143
    assert "rank 1 did not come to the end of step 6 within 1 s" in ended.err
    assert saved(msrun, 5).world_size == 3


def test_who_says_nothing_is_not_waited_for(msrun: Launcher) -> None:
    job = start(msrun, "1=mute", options=("--grace=1.5",))
    job.signal(signal.SIGTERM)
    assert "rank 1 did not say within 1 s where to stay" in job.wait().err
    assert saved(msrun, 5).world_size == 3


def test_who_does_not_leave_is_killed(msrun: Launcher) -> None:
    job = start(msrun, "1=stays", options=("--grace=2", "--shutdown-timeout=1"))
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 143
    assert (
        "not gracefully: rank 1 still alive 2 s after the order to exit\nmsrun: saved: step 6, "
        in ended.err
    )
    assert saved(msrun, 6).world_size == 3


def test_who_fails_when_it_leaves_is_named(msrun: Launcher) -> None:
    job = start(msrun, "1=fails")
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 143
    assert "rank 1 on" in ended.err
    reason = "not gracefully: rank 1 exited with code 3 when it was ordered to exit"
    assert re.search(rf"{reason}\nmsrun: training was .*\nmsrun: saved: step 6, ", ended.err)


# --- where some ranks cannot stay


def test_what_some_ranks_hold_is_saved_at_once(msrun: Launcher) -> None:
    (msrun.tmp / "ckpt").mkdir()
    job = msrun.start("--nproc-per-node=2", WORKERS / "guarded.py", "ckpt", "1=apart")
    job.await_state("running")
    poll(lambda: len(job.seen("Registered")) == 1)
    job.signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 143
    assert (
        "the state is saved before the stop; one more signal ends the job without it" in ended.err
    )
    assert saved(msrun, 5).reason == "msrun received SIGTERM"
