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


def test_under_nohup_a_hangup_stays_ignored():
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-c", CODE, "SIGHUP"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (GOES_ON, 0), done.stderr
