"""Signals told to another thread at once, and to no child."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from worker_hooks.guard.signal_wakeup import SignalWakeup

ROOT = Path(__file__).parents[4]
LONG_S = 20.0


@pytest.fixture(name="wakeup")
def _wakeup():
    wakeup = SignalWakeup([signal.SIGUSR1])
    yield wakeup
    wakeup.restore()
    if wakeup._is_open:
        wakeup._close()


def heard(wakeup):
    ready, _, _ = select.select([wakeup.fileno], [], [], LONG_S)
    assert ready
    return wakeup.take()


def test_a_signal_is_heard_and_another_is_not(wakeup):
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard(wakeup) == set()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard(wakeup) == {signal.SIGUSR1}
        assert wakeup.take() == set()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_what_the_script_takes_for_itself_is_none_of_ours(wakeup):
    own = []
    signal.signal(signal.SIGUSR1, lambda *_: own.append(1))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard(wakeup) == set()
    assert own == [1]
    wakeup.restore()
    assert signal.getsignal(signal.SIGUSR1) not in {signal.SIG_DFL, None}
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_whose_descriptor_it_was_hears_it_too():
    read, write = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(write)
    wakeup = SignalWakeup([signal.SIGUSR1])
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard(wakeup) == {signal.SIGUSR1}
        assert os.read(read, 10) == bytes([signal.SIGUSR1])
    finally:
        wakeup.restore()
        wakeup._close()
        assert signal.set_wakeup_fd(-1) == write
        os.close(read)
        os.close(write)


def test_who_takes_the_descriptor_later_does_not_make_us_deaf(wakeup):
    read, write = os.pipe2(os.O_NONBLOCK)
    try:
        ours = signal.set_wakeup_fd(write)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard(wakeup) == {signal.SIGUSR1}  # by the handler in the main thread
        assert signal.set_wakeup_fd(ours) == write
    finally:
        os.close(read)
        os.close(write)


def test_a_child_dies_of_the_signal_and_its_parent_hears_nothing(wakeup):
    pid = os.fork()
    if not pid:
        time.sleep(LONG_S)
        os._exit(0)
    os.kill(pid, signal.SIGUSR1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGUSR1
    assert wakeup.take() == set()


def test_everything_is_put_back(wakeup):
    wakeup.restore()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def python(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode


def test_another_thread_gives_way_while_the_main_thread_is_blocked():
    code = """
        import ctypes, os, select, signal, threading
        from worker_hooks.guard.signal_wakeup import SignalWakeup
        wakeup = SignalWakeup([signal.SIGTERM])
        def listen():
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            select.select([wakeup.fileno], [], [])
            (number,) = wakeup.take()
            wakeup.give_way(number)
        threading.Thread(target=listen, daemon=True).start()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        threading.Timer(20, os._exit, (3,)).start()
        ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    """
    assert python(code) == -signal.SIGTERM


def test_a_signal_that_was_ignored_is_ignored_again():
    code = """
        import os, signal
        from worker_hooks.guard.signal_wakeup import SignalWakeup
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wakeup = SignalWakeup([signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
        (number,) = wakeup.take()
        wakeup.give_way(number)
        raise SystemExit(7)
    """
    assert python(code) == 7
