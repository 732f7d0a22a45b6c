"""Signals between two jobs of one msrun, in a process of their own."""

import signal
import subprocess
import sys

import pytest

CODE = """
import os, signal, sys
from types import SimpleNamespace
from agent.launch import signals

spec = SimpleNamespace(signals=("SIGTERM", "SIGINT", "SIGHUP"), graceful_signals=())
signals.note_late(spec)
os.kill(os.getpid(), signal.Signals[sys.argv[1]])
print("reported", flush=True)
signals.take_back(spec)
print("goes on", flush=True)
signals.take_back(spec)
"""
REPORTED, GOES_ON = "reported\n", "reported\ngoes on\n"


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("SIGTERM", -signal.SIGTERM, REPORTED),
        ("SIGHUP", -signal.SIGHUP, REPORTED),
        ("SIGINT", -signal.SIGINT, REPORTED),
        ("SIGUSR1", 0, GOES_ON),  # it was for the ranks
    ],
)
def test_a_request_after_a_jobs_end_ends_the_one_that_would_follow(name, code, said):
    command = [sys.executable, "-c", CODE, name]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (said, code), done.stderr


LEAVES = """
import os, signal, sys
from types import SimpleNamespace
from agent.launch import signals

class Left(Exception):
    pass

spec = SimpleNamespace(signals=("SIGTERM", "SIGINT"), graceful_signals=(signal.SIGUSR1,))
signals.note_late(spec)
name, when = signal.Signals[sys.argv[1]], sys.argv[2]
if when == "before":
    os.kill(os.getpid(), name)
try:
    signals.take_back(spec, lambda number: Left(number))
    if when == "after":
        os.kill(os.getpid(), name)
except Left as left:
    print("left by", *left.args, flush=True)
os.kill(os.getpid(), name)
print("lives", flush=True)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_node_that_may_leave_does_so_between_two_jobs_and_the_next_signal_kills(name, when):
    command = [sys.executable, "-c", LEAVES, name, when]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    signum = signal.Signals[name]
    assert (done.stdout, done.returncode) == (f"left by {signum:d}\n", -signum), done.stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_person_at_the_keyboard_means_the_job(when):
    command = [sys.executable, "-c", LEAVES, "SIGINT", when]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", -signal.SIGINT), done.stderr


DEFERS = """
import asyncio, os, signal
from pathlib import Path
from agent.launch import signals
from agent.spec.job_spec import ClusterSpec, JobSpec, Program, ProgramKind
from agent.supervisor.requests import Requests

program = Program("train.py", (), ProgramKind.SCRIPT, "python")
spec = JobSpec(program, 1, "r", "r", cluster=ClusterSpec(3, least=1, leaves=True))
signals.take_back(spec, lambda _: ValueError("it has left"))
signals.defer(spec)
os.kill(os.getpid(), signal.SIGTERM)
print("begins", flush=True)
if %r:
    os.kill(os.getpid(), signal.SIGTERM)
loop = asyncio.new_event_loop()
signals.hold(spec)
requests = Requests(spec, Path("/none"), 0.0, print)
requests.attach(loop, lambda event: (print(event.leaves, flush=True), loop.stop()), lambda: 0)
loop.run_forever()
"""


@pytest.mark.parametrize(
    ("is_again", "said", "code"),
    [(False, "begins\nTrue\n", 0), (True, "begins\n", -signal.SIGTERM)],
)
def test_a_node_with_which_others_begin_leaves_once_its_run_has_begun(is_again, said, code):
    """They would count on it, and end with it if it was node 0; a second signal kills."""
    command = [sys.executable, "-c", DEFERS % is_again]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (said, code), done.stderr


def test_under_nohup_a_hangup_stays_ignored():
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-c", CODE, "SIGHUP"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (GOES_ON, 0), done.stderr
