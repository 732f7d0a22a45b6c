"""The agent's part of a replacement: who lives on, who comes, from what, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.jobs import DEADLINE_S, WORKERS, Job, Launcher, poll

from agent.spec.job_spec import Timeouts
from worker_hooks.storage import manifest

STEP_5 = "tft_saved_checkpoints-step_5"


def start(msrun: Launcher, last: int, *how: str, ranks: int = 3, options: tuple = ()) -> Job:
    words = (f"--nproc-per-node={ranks}", *options, WORKERS / "rejoining.py", "ckpt", last, *how)
    job = msrun.start(*words)
    job.await_state("running")
    job.await_seen("Registered", ranks)
    return job


def kill(job: Job, *ranks: int) -> None:
    pids = job.pids()
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)


def files_in_memory(job: Job) -> int:
    links = [os.readlink(path) for path in Path(f"/proc/{job.pid}/fd").iterdir()]
    return sum("msrun-memory" in link for link in links)


def follow_logs(msrun: Launcher) -> Callable[[], str]:
    """All that ``msrun logs -f`` shows from now on to the end of the run."""
    words, shown = [sys.executable, "-m", "msrun", "logs", "-f"], msrun.tmp / "shown"
    with open(shown, "wb") as out:
        follower = subprocess.Popen(words, env=msrun.env(), cwd=msrun.tmp, stdout=out)
    msrun.helpers.append(follower)
    poll(shown.read_bytes)
    return lambda: (follower.wait(DEADLINE_S), shown.read_text())[1]


def test_only_who_is_lost_is_started_again_as_often_as_it_takes(msrun: Launcher) -> None:
    job = start(msrun, 2, "0=large")
    first = job.pids()
    kill(job, 2)
    job.await_seen("ForgetMemory")
    second = job.await_state("running") and job.pids()
    followed = follow_logs(msrun)
    assert {rank for rank in first if first[rank] != second[rank]} == {2}
    assert files_in_memory(job) == 0
    kill(job, 0, 2)
    ended = job.wait()
    assert ended.code == 0, ended
    shown = followed()
    assert shown.count("[rank 1]: ready\n") == 1  # its file goes on
    assert shown.count("[rank 2]: ready\n") == 2  # of the present attempt, and the last
    (one, two) = job.seen("ReplaceRanks")
    assert (one["survivors"], one["newcomers"], one["attempt"]) == ([0, 1], [2], 1)
    assert (two["survivors"], two["newcomers"], two["attempt"]) == ([1], [0, 2], 2)
    saves = [set(one["writers"]) for one in job.seen("SaveRanks")]
    assert (saves[0], saves[-1]) == ({0, 1}, {1})
    assert all(
        each == {2} for each in saves[1:-1]
    )  # rank 0's death was known before that of rank 2
    assert sorted(event["rank"] for event in job.seen("Rejoining")) == [0, 1, 1]
    assert ended.err.count(one["reason"]) == 1
    assert not (msrun.tmp / "ckpt").exists()
    logs = job.logs()
    weights = b"hts!".hex()
    assert logs["worker_1.log"].split("\n")[:-1] == [
        "ready",
        f"lives on with memory 5 {weights} 01010101",
        "goes on in 1",
        f"lives on with memory 5 {weights} 01010101",
        "goes on in 2",
    ]
    assert logs["worker_2.attempt_0.log"] == "ready\n"
    assert logs["worker_2.attempt_1.log"].startswith(f"began with memory 5 {weights} 02020202\n")
    assert "worker_1.attempt_0.log" not in logs
    for line in ("[rank 1]: goes on in 2", "[rank 2]: goes on in 1", "[rank 2]: goes on in 2"):
        assert ended.out.count(line) == 1  # what survivors write is shown once, and on
    assert ended.out.count("[rank 2]: ready") == 3
    status = job.status()
    assert {worker["attempt"] for worker in status["workers"]} == {2}
    assert (status["restarts"], status["replaced"], status["max_replacements"]) == (0, 3, 20)
    assert "attempt  2, 0 of 0 restarts, 3 replaced\n" in msrun.command("status").out


def test_a_newcomer_begins_while_the_state_is_saved(msrun: Launcher) -> None:
    job = start(msrun, 1, "0=waits")
    kill(job, 2)
    ended = job.wait()
    assert ended.code == 0, ended
    logs = job.logs()
    assert logs["worker_2.attempt_0.log"] == "ready\n"
    assert logs["worker_2.log"].startswith("began with memory 5 ")
    assert ended.out.count("[rank 2]: ready") == 2
    assert "worker_2.log.next" not in logs
    names = [one["event"] for one in job.events()]
    assert names.index("PrepareRanks") < names.index("Written")
    assert len(job.seen("WorkerStarted")) == 4


def test_newcomers_that_nobody_wants_leave_no_trace(msrun: Launcher) -> None:
    job = start(msrun, 1, "0=fails", "1=fails")
    kill(job, 2)
    ended = job.wait()
    assert ended.code == 1, ended
    assert "the test says so" in ended.err
    logs = job.logs()
    assert logs["worker_2.log"] == "ready\n"  # of the dead rank, for whoever looks for the cause
    assert {name for name in logs if name.startswith("worker")} == {
        f"worker_{n}.log" for n in range(3)
    }
    assert job.seen("ReplaceRanks") == []


def test_what_they_wrote_is_none_of_the_next_attempts(msrun: Launcher) -> None:
    how, options = ("0=fails", "1=fails", "2=tells"), ("--max-restarts=1", "-r", "3")
    job = start(msrun, 1, *how, options=options)
    kill(job, 2)
    assert job.wait().code == 0
    (path,) = msrun.tmp.rglob("attempt_1/2/stdout.log")
    assert path.read_text() == "begins\nready\n"


def test_a_newcomer_that_was_not_even_forked_is_none_of_the_next_attempt(msrun: Launcher) -> None:
    job = start(msrun, 1, "0=fails", "1=fails", options=("--max-restarts=1",))
    os.kill(job.forkserver(), signal.SIGSTOP)
    kill(job, 2)
    job.await_seen("PrepareRanks")
    (msrun.tmp / "ckpt.begun").write_text("0")
    ended = job.wait()
    assert ended.code == 0, ended
    started = [(one["rank"], one["attempt"]) for one in job.seen("WorkerStarted")]
    assert sorted(started) == [(rank, attempt) for rank in range(3) for attempt in range(2)]
    assert len(job.seen("ForkserverEnded")) == 1


def test_what_is_in_memory_goes_to_the_disk_when_nobody_can_be_replaced(msrun: Launcher) -> None:
    job = start(msrun, 9, "2=falls")
    kill(job, 2)
    ended = job.wait()
    assert ended.code == 1, ended
    folder = msrun.tmp / "ckpt" / STEP_5
    found = manifest.read(folder)
    assert manifest.verify(folder, found) == []
    assert (found.kind, found.step, found.epoch, found.batch) == ("dump", 5, 1, 5)
    assert {shard.rank for shard in found.shards if shard.kind == "private"} == {0, 1, 2}
    assert os.listdir(msrun.tmp / "ckpt") == [STEP_5]
    assert "saved from memory in 0." in ended.err
    assert (
        "msrun: not replaced: rank 2 died three times at step 5\nmsrun: saved: step 5," in ended.err
    )
    assert "was killed by SIGKILL" in ended.err


def test_a_survivor_that_is_lost_on_the_way_makes_another_round(msrun: Launcher) -> None:
    job = start(msrun, 2, "1=closes")
    kill(job, 2)
    ended = job.wait()
    assert ended.code == 0, ended
    rounds = [(event["survivors"], event["newcomers"]) for event in job.seen("ReplaceRanks")]
    assert rounds == [([0, 1], [2]), ([0], [1, 2])]


def test_a_dead_forkserver_is_replaced_first(msrun: Launcher) -> None:
    job = start(msrun, 1, ranks=2)
    os.kill(job.forkserver(), signal.SIGSTOP)  # so that it dies with the order in its hands
    kill(job, 1)
    job.await_seen("ReplaceRanks")
    os.kill(job.forkserver(), signal.SIGKILL)
    assert job.wait().code == 0
    assert len(job.seen("ForkserverEnded")) == 1
    assert job.logs()["worker_0.log"].endswith("goes on in 1\n")


def test_a_stopped_forkserver_is_replaced_first_too(msrun: Launcher) -> None:
    job = start(msrun, 1, ranks=2)
    os.kill(job.forkserver(), signal.SIGSTOP)
    kill(job, 1)
    ended = job.wait()
    assert ended.code == 0, ended
    assert ended.err.count("the forkserver is stopped by a signal and starts no rank") == 1
    assert [one["newcomers"] for one in job.seen("ReplaceRanks")] == [[1]]
    assert job.logs()["worker_0.log"].endswith("goes on in 1\n")


def test_when_msrun_dies_after_a_replacement_no_survivor_is_left(msrun: Launcher) -> None:
    job = start(msrun, 9)
    kill(job, 2)
    job.await_seen("ForgetMemory")
    job.signal(signal.SIGKILL)
    job.process.wait()
    poll(lambda: not msrun.marked(), within_s=Timeouts().grace_s)
