"""Forks by a middle process, told to the end or not at all: each case in a subreaper of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PRELUDE = """
import errno, json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from agent.forkserver import adoption
from agent.workers.processes import become_subreaper

become_subreaper()
first = os.getpid()
ran, run = os.pipe()

def fork(count):
    outcome = adoption.fork_adopted(count)
    if isinstance(outcome, int):
        fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1]  # the last lists them
        os.write(run, f"{outcome} {os.getpid()} {len(fds)}\\n".encode())
        os._exit(10 + outcome)
    return outcome

def end(outcomes):
    os.close(run)
    lines = b"".join(iter(lambda: os.read(ran, 4096), b"")).decode().split("\\n")[:-1]
    codes = {}
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            break
        codes[pid] = os.waitstatus_to_exitcode(status)
    print(json.dumps({"outcomes": outcomes, "ran": [line.split() for line in lines],
                      "codes": [codes.pop(pid, None) for pid, _ in outcomes],
                      "others": list(codes.values()), "fds": len(os.listdir("/proc/self/fd"))}))
"""
PLAIN = "end(fork({count}))"
# The middle process is killed instead of its Nth write: it tells of each child, then says go.
KILLED = """
written, write = 0, os.write
def kill_at(fd, data):
    global written
    if os.getpid() != first:
        if written == {at}:
            os.kill(os.getpid(), signal.SIGKILL)
        written += 1
    return write(fd, data)
os.write = kill_at
outcomes = fork({count})
os.write = write
end(outcomes)
"""
# The Nth fork fails, the middle process's own being the 0th.
FAILING = """
forked, fork_truly = 0, os.fork
def fail_at():
    global forked
    forked += 1
    if forked - 1 in {at}:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork_truly()
os.fork = fail_at
end(fork({count}))
"""
NO_PIPE = """
import resource
used = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (used + {free}, 1000))
outcomes = fork({count})
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
end(outcomes)
"""
WHY = "fork: Resource temporarily unavailable; raise the limit of processes (ulimit -u) or free memory"


def played(script: str, **values: object) -> dict:
    for name, value in values.items():
        script = script.replace(f"{{{name}}}", repr(value))
    done = subprocess.run(
        [sys.executable, "-S", "-c", PRELUDE + script, str(ROOT)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize("count", [1, 5, 64])
def test_outcomes_are_in_order_and_every_child_runs_and_is_ours(count):
    seen = played(PLAIN, count=count)
    assert [why for _, why in seen["outcomes"]] == [""] * count
    ran = {int(index): int(pid) for index, pid, _ in seen["ran"]}
    assert [ran[index] for index in range(count)] == [pid for pid, _ in seen["outcomes"]]
    assert seen["codes"] == [10 + index for index in range(count)]
    assert seen["others"] == []


def test_no_descriptor_is_left_here():
    assert played(PLAIN, count=3)["fds"] == played("end(())")["fds"]


def test_no_descriptor_is_left_in_a_child():
    (_, _, here), *_ = played(
        "os.write(run, b'0 0 %d\\n' % (len(os.listdir('/proc/self/fd')) - 1)); end(())"
    )["ran"]
    assert {fds for _, _, fds in played(PLAIN, count=3)["ran"]} == {here}


@pytest.mark.parametrize("at", range(5))
def test_a_killed_middle_process_answers_for_all_and_none_runs(at):
    """At 0 it had forked one and told of none, at 4 it had told of all but one of five."""
    seen = played(KILLED, count=5, at=at)
    assert seen["outcomes"] == [[0, "the process that forks it was killed"]] * 5
    assert seen["ran"] == []
    assert seen["others"] == [1] * (at + 1)


def test_if_all_were_told_but_none_released_they_leave_and_are_seen_to():
    seen = played(KILLED, count=3, at=3)
    assert [why for _, why in seen["outcomes"]] == [""] * 3
    assert (seen["ran"], seen["codes"], seen["others"]) == ([], [1, 1, 1], [])


def test_without_a_middle_process_each_outcome_says_why():
    seen = played(FAILING, count=3, at=(0,))
    assert (seen["outcomes"], seen["ran"]) == ([[0, WHY]] * 3, [])
    assert seen["fds"] == played("end(())")["fds"]


def test_a_fork_that_fails_says_why_and_the_others_run():
    seen = played(FAILING, count=4, at=(2, 4))
    assert [why for _, why in seen["outcomes"]] == ["", WHY, "", WHY]
    assert [bool(pid) for pid, _ in seen["outcomes"]] == [True, False, True, False]
    assert sorted(index for index, _, _ in seen["ran"]) == ["0", "2"]


@pytest.mark.parametrize("free", [1, 3])
def test_too_few_descriptors_are_a_reason_not_an_exception(free):
    seen = played(NO_PIPE, count=2, free=free)
    assert [pid for pid, _ in seen["outcomes"]] == [0, 0]
    assert all("Too many open files" in why for _, why in seen["outcomes"])
    assert seen["fds"] == played("end(())")["fds"]
