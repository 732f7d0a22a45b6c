"""A copy of a process draws its live displays on, and can end them."""

import subprocess
import sys

from support.jobs import DEADLINE_S, ROOT

SCRIPT = """
import io, os, sys, threading, time
sys.path.insert(0, {root!r})
from rich.console import Console
from rich.live import Live
from worker_hooks.shadows import live_displays
drawn = []
class Slow:
    def __rich__(self):
        drawn.append(os.getpid())
        time.sleep(0.01)  # the lock is held nearly always
        return "here"
console = Console(file=io.StringIO(), force_terminal=True)
live = Live(Slow(), console=console, refresh_per_second=1000)
live.start()
(thread,) = (each for each in threading.enumerate() if each is not threading.main_thread())
assert live_displays.threads() == {{id(thread)}}
{change}
for _ in range(20):
    with live_displays.still() as found:
        assert found.why_not == {why!r}, found.why_not
        copy = 0 if found.why_not else os.fork()
    if copy:
        assert os.waitpid(copy, 0)[1] == 0
        continue
    if found.why_not:
        os._exit(0)
    found.go_on()
    while drawn.count(os.getpid()) < 3:
        time.sleep(0.001)
    live.stop()
    os._exit(0)
live.stop()
"""


def run(change="", why=""):
    script = SCRIPT.format(root=str(ROOT), change=change, why=why)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_each_copy_draws_and_ends():
    run()


def test_a_thread_of_the_scripts_own_is_not_known():
    script = """
import io, sys
sys.path.insert(0, {root!r})
from rich.live import Live, _RefreshThread
from worker_hooks.shadows import live_displays
class Own(_RefreshThread):
    pass
thread = Own(Live(), 10)
thread.start()
assert not live_displays.threads()
Own.__module__ = "lightning.pytorch.callbacks.progress.rich_progress"
assert live_displays.threads() == {{id(thread)}}
"""
    words = [sys.executable, "-c", script.format(root=str(ROOT))]
    done = subprocess.run(words, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_another_display_is_refused():
    run("live._lock = None", "this Rich's live display is not known")
