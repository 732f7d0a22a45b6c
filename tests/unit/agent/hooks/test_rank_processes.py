"""What is known of the ranks' processes, here and on other nodes."""

import os
import signal
import subprocess
from types import SimpleNamespace

import pytest
from support.jobs import poll

from agent.hooks.rank_processes import GONE, STALE_S, RankProcesses
from agent.machine.process_use import ProcessNews

AT_WORK = ProcessNews("R", 2.5, is_frozen=False).packed()


@pytest.fixture
def known():
    """Ranks 0 and 1 are here, of which 1 has no process; the others elsewhere."""
    clock = SimpleNamespace(now=1.0)
    pids = {0: os.getpid(), 1: 0}
    processes = RankProcesses((0, 1), pids.get)
    processes.attach(SimpleNamespace(time=lambda: clock.now))
    return SimpleNamespace(clock=clock, processes=processes)


def test_a_process_of_this_node_is_looked_at(known):
    state, cpu_s = known.processes.use(0)
    assert state in "RS"
    assert cpu_s > 0
    assert known.processes.use(1) == (GONE, 0.0)
    assert known.processes.use(1, os.getpid())[0] in "RS"  # it has no link yet
    assert not known.processes.is_frozen(0)


def test_of_another_node_is_known_what_it_told_last(known):
    assert known.processes.use(7) == (GONE, 0.0)
    known.processes.tell({7: AT_WORK, 8: ProcessNews("S", 0.0, is_frozen=True).packed()}, 0)
    assert known.processes.use(7, 1234) == ("R", 2.5)
    assert [known.processes.is_frozen(rank) for rank in (6, 7, 8)] == [False, False, True]
    known.processes.forget([7])
    assert known.processes.use(7) == (GONE, 0.0)


def test_a_node_that_has_not_spoken_lately_is_not_known(known):
    assert known.processes.are_known((0, 1))
    assert [known.processes.are_here(ranks) for ranks in ((0, 1), (0, 7))] == [True, False]
    assert not known.processes.are_known((0, 7))
    known.processes.tell({7: AT_WORK}, 4)
    assert known.processes.are_known((0, 7))
    assert [known.processes.are_known((0, 7), at) for at in (4, 5)] == [True, False]
    assert known.processes.are_known((0, 1), 5)
    known.clock.now += STALE_S + 0.1
    assert not known.processes.are_known((0, 7))
    assert known.processes.are_known((0,))
    known.processes.tell({8: AT_WORK}, 0)
    assert not known.processes.are_known((7, 8))


def test_a_stopped_process_is_told_as_such():
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        poll(lambda: ProcessNews.of(process.pid).state == "T")
        process.kill()
