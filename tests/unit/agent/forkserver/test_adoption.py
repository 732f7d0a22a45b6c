"""Forks by a middle process: who runs is known first. Each case in a subreaper of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PRELUDE = """
import errno, json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from agent.forkserver import adoption, child
from agent.workers.processes import become_subreaper

become_subreaper()
first = os.getpid()
ran, run = os.pipe()
known, know = os.pipe()

def introduce(index):
    child.detach(first)
    os.write(know, f"{index} {os.getpid()}\\n".encode())

def fork(count):
    outcome = adoption.fork_adopted(count, introduce)
    if isinstance(outcome, int):
        fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1]  # the last lists them
        os.close(know)
        os.close(known)
        os.write(run, f"{outcome} {os.getpid()} {len(fds)}\\n".encode())
        os._exit(10 + outcome)
    return outcome

def read(pipe):
    return b"".join(iter(lambda: os.read(pipe, 4096), b"")).decode().split("\\n")[:-1]

def end(outcomes):
    os.close(run)
    os.close(know)
    codes = {}
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            break
        codes[pid] = os.waitstatus_to_exitcode(status)
    print(json.dumps({"outcomes": outcomes, "ran": [line.split() for line in read(ran)],
                      "known": [line.split() for line in read(known)],
                      "codes": [codes.pop(pid, None) for pid, _ in outcomes],
                      "others": list(codes.values()), "fds": len(os.listdir("/proc/self/fd"))}))
"""
PLAIN = "end(fork({count}))"
# The middle process is killed instead of its Nth fork, the first fork being that of itself.
KILLED = """
forked, fork_truly = 0, os.fork
def kill_at():
    global forked
    if forked == 1 + {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    forked += 1
    return fork_truly()
os.fork = kill_at
end(fork({count}))
"""
# A child is killed before or after it introduced itself, or before it reports that it did.
CHILD_KILLED = """
introduce_truly = introduce
def introduce(index):
    if index == 1 and {before}:
        os.kill(os.getpid(), signal.SIGKILL)
    introduce_truly(index)
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
end(fork({count}))
"""
# The forkserver itself is killed once its middle process exists; the first process looks on.
FORKSERVER_KILLED = """
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
forkserver = os.fork()
if forkserver == 0:
    adoption._read_results = die
    fork({count})
end(())
"""
IGNORED = "signal.signal(signal.SIGCHLD, signal.SIG_IGN); outcomes = fork({count}); "
IGNORED += "signal.signal(signal.SIGCHLD, signal.SIG_DFL); os.close(run); os.close(know); "
IGNORED += "print(json.dumps({'outcomes': outcomes, 'ran': [one.split() for one in read(ran)]}))"
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
    assert sorted(seen["known"]) == sorted([index, pid] for index, pid, _ in seen["ran"])


def test_no_descriptor_is_left_here():
    assert played(PLAIN, count=3)["fds"] == played("end(())")["fds"]


def test_no_descriptor_is_left_in_a_child():
    (_, _, here), *_ = played(
        "os.write(run, b'0 0 %d\\n' % (len(os.listdir('/proc/self/fd')) - 1)); end(())"
    )["ran"]
    assert {fds for _, _, fds in played(PLAIN, count=3)["ran"]} == {here}


@pytest.mark.parametrize("at", range(5))
def test_of_a_killed_middle_process_those_run_that_are_known_and_the_others_are_answered_for(at):
    seen = played(KILLED, count=5, at=at)
    assert [why for _, why in seen["outcomes"]] == [""] * at + ["it was killed before it began"] * (
        5 - at
    )
    assert seen["codes"] == [10 + index for index in range(at)] + [None] * (5 - at)
    ran = [[index, pid] for index, pid, _ in seen["ran"]]
    told = [[str(index), str(pid)] for index, (pid, _) in enumerate(seen["outcomes"]) if pid]
    assert sorted(seen["known"]) == sorted(ran) == told
    assert seen["others"] == []


@pytest.mark.parametrize("before", [True, False])
def test_a_child_that_is_killed_before_it_runs_is_answered_for(before):
    seen = played(CHILD_KILLED, count=3, before=before)
    assert [why for _, why in seen["outcomes"]] == ["", "it was killed before it began", ""]
    assert sorted(index for index, *_ in seen["ran"]) == ["0", "2"]
    assert sorted(index for index, _ in seen["known"]) == (
        ["0", "2"] if before else ["0", "1", "2"]
    )
    assert seen["others"] == [-9]


def test_if_the_forkserver_is_killed_who_runs_is_known_all_the_same():
    seen = played(FORKSERVER_KILLED, count=4)
    assert len(seen["ran"]) == 4
    assert sorted(seen["known"]) == sorted([index, pid] for index, pid, _ in seen["ran"])
    assert min(seen["others"]) == -9


def test_where_sigchld_is_ignored_all_are_told_of():
    seen = played(IGNORED, count=3)
    assert [why for _, why in seen["outcomes"]] == [""] * 3
    assert sorted(int(pid) for _, pid, _ in seen["ran"]) == sorted(
        pid for pid, _ in seen["outcomes"]
    )


def test_without_a_middle_process_each_outcome_says_why():
    seen = played(FAILING, count=3, at=(0,))
    assert (seen["outcomes"], seen["ran"]) == ([[0, WHY]] * 3, [])
    assert seen["fds"] == played("end(())")["fds"]


def test_a_fork_that_fails_says_why_and_the_others_run():
    seen = played(FAILING, count=4, at=(2, 4))
    assert [why for _, why in seen["outcomes"]] == ["", WHY, "", WHY]
    assert [bool(pid) for pid, _ in seen["outcomes"]] == [True, False, True, False]
    assert sorted(index for index, _, _ in seen["ran"]) == ["0", "2"]


@pytest.mark.parametrize("free", [0, 1])
def test_too_few_descriptors_are_a_reason_not_an_exception(free):
    seen = played(NO_PIPE, count=2, free=free)
    assert [pid for pid, _ in seen["outcomes"]] == [0, 0]
    assert all("Too many open files" in why for _, why in seen["outcomes"])
    assert seen["fds"] == played("end(())")["fds"]


ABANDONED = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
from agent.forkserver import child

agent = subprocess.Popen(["sleep", "600"])
if os.fork() == 0:  # whose parent is gone, and then the agent
    ready, go = os.pipe()
    if os.fork() == 0:
        os.close(go)
        os.read(ready, 1)  # until the parent has ended
        print("waits", flush=True)
        child.detach(agent.pid)
        print("became a worker of nobody", flush=True)
        os._exit(0)
    os._exit(0)
sys.stdin.read()
agent.kill()
"""


@pytest.mark.parametrize("is_early", [True, False], ids=["before it looks", "while it waits"])
def test_who_is_forked_for_an_agent_that_dies_ends_with_it(is_early):
    """Its parent is then init, or another process that never ends."""
    words = [sys.executable, "-c", ABANDONED, str(ROOT)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        if not is_early:
            assert run.stdout.readline() == "waits\n"
        run.stdin.close()
        # the line ends with the last process that holds it
        done = threading.Thread(target=run.stdout.read)
        done.start()
        done.join(30)
        assert not done.is_alive()
