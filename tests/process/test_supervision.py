"""Real workers that die, refuse to, or leave children: msrun notices, stops, restarts, cleans up."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.jobs import WORKERS, Job, Launcher, poll

from agent.spec.job_spec import Timeouts

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def ready(job: Job, count: int) -> Job:
    job.await_lines("ready", count)
    job.await_state("running")
    return job


def test_all_ranks_leave_with_0_and_so_does_msrun(msrun: Launcher) -> None:
    job = msrun.start("--nproc-per-node=3", WORKERS / "leave.py", "rest=0")
    assert job.wait().code == 0
    assert job.status()["state"] == "succeeded"
    assert [worker["exit_code"] for worker in job.status()["workers"]] == [0, 0, 0]


def test_a_rank_that_leaves_early_with_0_is_no_failure(msrun: Launcher) -> None:
    job = msrun.start("--nproc-per-node=2", WORKERS / "leave.py", "1=0")
    ready(job, 1)
    poll(lambda: job.status()["workers"][1]["state"] == "succeeded")
    assert job.status()["state"] == "running"
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143


@pytest.mark.parametrize("code", [1, 2, 3, 99, 255])
def test_a_failing_rank_fails_the_job_with_1_and_is_named(msrun: Launcher, code: int) -> None:
    job = msrun.start("--nproc-per-node=3", WORKERS / "leave.py", f"1={code}")
    ended = job.wait()
    assert ended.code == 1
    assert ended.err.startswith("msrun: rank 1 on ")
    assert f"exited with code {code}" in ended.err.splitlines()[0]
    states = [worker["state"] for worker in job.status()["workers"]]
    assert states == ["stopped", "failed", "stopped"]


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGRTMIN + 3]
)
def test_a_killed_rank_is_named_with_its_signal(msrun: Launcher, signum: int) -> None:
    job = msrun.start("--nproc-per-node=2", WORKERS / "leave.py", f"0=-{int(signum)}")
    ended = job.wait()
    assert ended.code == 1
    assert ended.err.startswith("msrun: rank 0 on ")
    assert job.status()["workers"][0]["exit_code"] == -signum


@pytest.mark.parametrize("signum", STOPS)
def test_a_stop_signal_is_forwarded_and_named_by_the_exit_code(
    msrun: Launcher, signum: int
) -> None:
    job = ready(msrun.start("--nproc-per-node=2", WORKERS / "wait.py"), 2)
    job.signal(signum)
    ended = job.wait()
    assert ended.code == 128 + signum
    assert f"stopped by {signal.Signals(signum).name}" in ended.err
    sent = [event for event in job.events() if event["event"] == "SignalRanks"]
    assert [(event["signum"], event["ranks"]) for event in sent] == [(signum, [0, 1])]


def test_ranks_that_leave_with_0_when_stopped_do_not_make_it_a_success(msrun: Launcher) -> None:
    job = ready(msrun.start("--nproc-per-node=2", WORKERS / "wait.py", "polite"), 2)
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143
    assert job.status()["state"] == "stopped"


def test_a_stop_before_the_first_fork_starts_nothing(msrun: Launcher) -> None:
    slow = msrun.tmp / "slow.py"
    slow.write_text("import time; time.sleep(600)")
    script = msrun.tmp / "train.py"
    script.write_text("import torch, slow")
    job = msrun.start(
        "--preload=slow", script, PYTHONPATH=f"{msrun.tmp}:{msrun.env()['PYTHONPATH']}"
    )
    job.await_state("starting")
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143
    assert not any(event["event"] == "WorkerStarted" for event in job.events())


@pytest.mark.parametrize("how", ["signal", "failure"])
def test_the_shutdown_timeout_is_honoured_on_every_path(msrun: Launcher, how: str) -> None:
    job = msrun.start("--nproc-per-node=2", "--shutdown-timeout=1", WORKERS / "wait.py", "deaf")
    ready(job, 2)
    began = time.monotonic()
    if how == "signal":
        job.signal(signal.SIGTERM)
    else:
        os.kill(job.pids()[1], signal.SIGKILL)
    assert job.wait().code == (143 if how == "signal" else 1)
    assert 1 <= time.monotonic() - began < Timeouts().grace_s


def test_a_second_signal_means_now(msrun: Launcher) -> None:
    job = msrun.start("--nproc-per-node=2", "--shutdown-timeout=600", WORKERS / "wait.py", "deaf")
    ready(job, 2)
    job.signal(signal.SIGTERM)
    job.await_state("stopping")
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143


def test_a_stopped_process_is_killed_after_the_grace(msrun: Launcher) -> None:
    job = ready(msrun.start("--nproc-per-node=2", "--shutdown-timeout=1", WORKERS / "wait.py"), 2)
    os.kill(job.pids()[0], signal.SIGSTOP)
    killed_s = time.monotonic()
    os.kill(job.pids()[1], signal.SIGKILL)
    ended = job.wait()
    assert time.monotonic() - killed_s < Timeouts().grace_s
    assert ended.code == 1
    assert ended.err.startswith("msrun: rank 1 on ")


def test_user_signals_reach_the_workers_and_mean_nothing_to_msrun(msrun: Launcher) -> None:
    job = ready(msrun.start("--nproc-per-node=2", WORKERS / "wait.py"), 2)
    job.signal(signal.SIGUSR1)
    job.await_lines("got SIGUSR1", 2)
    job.signal(signal.SIGUSR2)
    job.await_lines("got SIGUSR2", 2)
    assert job.status()["state"] == "running"
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143


def test_a_user_signal_that_is_listed_as_handled_stops_the_job(msrun: Launcher) -> None:
    job = msrun.start(
        "--nproc-per-node=1",
        "--signals-to-handle=SIGUSR1",
        "--shutdown-timeout=1",
        WORKERS / "wait.py",
    )
    ready(job, 1)
    job.signal(signal.SIGUSR1)
    assert job.wait().code == 128 + signal.SIGUSR1


def test_hangup_is_ignored_under_nohup(msrun: Launcher) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = msrun.start("--nproc-per-node=1", WORKERS / "wait.py")
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ready(job, 1)
    job.signal(signal.SIGHUP)
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143


@pytest.mark.parametrize("what", ["exit", "die"])
def test_no_child_of_a_rank_outlives_the_job(msrun: Launcher, what: str) -> None:
    job = msrun.start("--nproc-per-node=2", "--shutdown-timeout=1", WORKERS / "family.py", what)
    assert job.wait().code == (0 if what == "exit" else 1)
    assert not msrun.marked()


@pytest.mark.parametrize("times", [1, 3])
def test_no_process_outlives_a_stop(msrun: Launcher, times: int) -> None:
    job = msrun.start("--nproc-per-node=2", "--shutdown-timeout=2", WORKERS / "family.py", "wait")
    job.await_lines("family", 2)
    for _ in range(times):
        job.signal(signal.SIGTERM)
    assert job.wait().code == 143
    assert not msrun.marked()


@pytest.mark.parametrize("also_forkserver", [False, True])
def test_no_worker_outlives_a_kill_of_msrun(msrun: Launcher, also_forkserver: bool) -> None:
    script = "wait.py" if also_forkserver else "family.py"
    job = msrun.start("--nproc-per-node=2", WORKERS / script, "wait")
    job.await_lines("ready" if also_forkserver else "family", 2)
    victims = [job.pid]
    if also_forkserver:
        victims.append(job.forkserver())
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    poll(lambda: not msrun.marked(), within_s=Timeouts().grace_s)


ORPHANS = """
import os, pathlib, signal, socket, subprocess, sys, time
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print("runs", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
link = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
print("connected", flush=True)
signal.pause()
"""


def test_an_order_that_nobody_waits_for_does_not_keep_orphans_alive(msrun: Launcher) -> None:
    """The forkserver carries it out, and cannot tell msrun, which was killed meanwhile."""
    script = msrun.tmp / "orphans.py"
    script.write_text(ORPHANS)
    job = msrun.start("--nproc-per-node=2", script)
    job.await_lines("runs", 2)
    server = job.forkserver()
    os.kill(server, signal.SIGSTOP)
    (msrun.tmp / "go").touch()
    job.await_lines("connected", 2)
    job.signal(signal.SIGUSR1)  # what comes after the connection, comes after the order
    poll(lambda: any(event["event"] == "SignalReceived" for event in job.events()))
    job.signal(signal.SIGKILL)
    job.process.wait()
    os.kill(server, signal.SIGCONT)
    poll(lambda: not msrun.marked(), within_s=Timeouts().grace_s)
    assert "Traceback" not in (job.folder / "scheduler.log").read_text()


def test_a_killed_forkserver_is_replaced_and_restarts_still_work(msrun: Launcher) -> None:
    job = ready(msrun.start("--nproc-per-node=2", "--max-restarts=1", WORKERS / "wait.py"), 2)
    old = job.forkserver()
    os.kill(old, signal.SIGKILL)
    poll(lambda: any(event["event"] == "ForkserverStarted" for event in job.events()))
    os.kill(job.pids()[1], signal.SIGKILL)
    poll(lambda: job.status()["attempt"] == 1 and job.status()["state"] == "running")
    assert job.forkserver() != old
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143


def test_restarts_are_counted_job_wide_and_end_with_the_budget(msrun: Launcher) -> None:
    job = msrun.start("--nproc-per-node=3", "--max-restarts=2", WORKERS / "leave.py", "2=7")
    ended = job.wait()
    assert ended.code == 1
    assert "restart 1 of 2: rank 2 exited with code 7" in ended.err
    assert "restart 2 of 2" in ended.err
    assert job.status()["attempt"] == 2
    kept = sorted(path.name for path in job.folder.glob("worker_2*"))
    assert kept == ["worker_2.attempt_0.log", "worker_2.attempt_1.log", "worker_2.log"]


def test_a_restart_that_succeeds_is_a_success(msrun: Launcher) -> None:
    job = msrun.start(
        "--nproc-per-node=2", "--max-restarts=3", WORKERS / "leave.py", "0=5@0", "rest=0@1"
    )
    assert job.wait().code == 0
    assert job.status()["attempt"] == 1


def test_a_stop_while_a_failure_is_cleared_away_prevents_the_restart(msrun: Launcher) -> None:
    job = msrun.start(
        "--nproc-per-node=2",
        "--max-restarts=5",
        "--shutdown-timeout=2",
        WORKERS / "wait.py",
        "deaf",
    )
    ready(job, 2)
    os.kill(job.pids()[0], signal.SIGKILL)
    job.await_state("stopping")
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143
    assert job.status()["attempt"] == 0


def test_an_idle_agent_sleeps(msrun: Launcher) -> None:
    job = ready(msrun.start("--nproc-per-node=8", WORKERS / "wait.py"), 8)

    def switches() -> int:
        total = 0
        for task in Path(f"/proc/{job.pid}/task").iterdir():
            lines = (task / "status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
        return total

    # on a busy machine the start may pause for a while, and is not over
    settled = poll(lambda: (a := switches()) == (time.sleep(2), switches())[1] and a)
    time.sleep(4)  # nothing can be awaited here: the claim is that nothing happens
    assert switches() - settled < 4
    job.signal(signal.SIGTERM)
    job.wait()


def test_every_worker_leads_its_own_session_and_is_msruns_child(msrun: Launcher) -> None:
    job = ready(msrun.start("--nproc-per-node=2", WORKERS / "wait.py"), 2)
    for pid in job.pids().values():
        assert os.getsid(pid) == pid == os.getpgid(pid)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        assert int(fields[1]) == job.pid
    job.signal(signal.SIGTERM)
    job.wait()
