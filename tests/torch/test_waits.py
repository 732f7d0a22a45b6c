"""Ranks that wait for a person, or for a file system, are no hang: real debuggers, real locks."""

from __future__ import annotations

import fcntl
import re
import subprocess
from pathlib import Path

import pytest
from support.jobs import WORKERS, Job, Launcher

pytestmark = [pytest.mark.torch, pytest.mark.warm]
WORDS = ("--worker_num=2", "--hang_timeout=3")


def await_judged_twice(job: Job) -> str:
    """The only standstill; the ranks were asked again since."""
    job.await_seen("HangJudged", 2)
    (told,) = job.seen("JobStandsStill")
    return str(told["reason"])


def check_end(job: Job, told: str) -> None:
    ended = job.wait()
    assert ended.code == 0, ended
    assert job.seen("RankHung") == []
    assert ended.err.count(told) == 1
    assert ended.err.count("there is progress again") == len(job.seen("JobMovesAgain")) == 1
    assert all("trained 128\n" in log for log in job.logs().values())


@pytest.mark.parametrize(("kind", "typed"), [("breakpoint", b"p 6 * 7\nc\n"), ("input", b"yes\n")])
def test_a_rank_that_waits_for_a_person_is_not_judged(
    msrun: Launcher, kind: str, typed: bytes
) -> None:
    job = msrun.start(*WORDS, WORKERS / "wait_in_training.py", kind, stdin=subprocess.PIPE)
    told = await_judged_twice(job)
    assert told.startswith("rank 1 waits for a person, in a debugger or for input from the termin")
    assert re.search(r"; rank 1 at .*wait_in_training.py:\d+ train: ", told)
    assert job.process.stdin is not None
    job.process.stdin.write(typed)
    job.process.stdin.flush()
    check_end(job, told)
    if kind == "breakpoint":
        assert "42\n" in job.logs()["worker_1.log"]


def test_an_outage_of_the_data_of_all_ranks_kills_none(msrun: Launcher, tmp_path: Path) -> None:
    with (tmp_path / "data").open("w") as data:
        fcntl.flock(data, fcntl.LOCK_EX)
        job = msrun.start(*WORDS, WORKERS / "wait_in_training.py", "lock")
        told = await_judged_twice(job)
    assert told.startswith("ranks 0-1 made no progress for ")
    assert ", and no rank waits in a collective: msrun takes it for an outage of what" in told
    assert "fcntl.flock(file, fcntl.LOCK_EX)" in told
    check_end(job, told)
