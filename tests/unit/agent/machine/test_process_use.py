"""What a process does is told with the processes below it."""

import os

from agent.machine import process_use


def test_a_process_is_told_with_its_children():
    state, used_s = process_use.process_use(os.getpid())
    assert (state, used_s > 0) == ("R", True)
    assert process_use.process_use(0) == ("X", 0.0)


def test_who_waits_for_a_child_inside_the_kernel_waits_there(monkeypatch):
    """A data loader's worker on a network file system, two processes below the rank."""
    family = {1: [2, 3], 3: [4]}
    states = {1: "S", 2: "S", 3: "S", 4: "D"}
    monkeypatch.setattr(process_use, "children", lambda pid: family.get(pid, []))
    monkeypatch.setattr(process_use, "_stat", lambda pid: (states[pid], pid * process_use._TICKS))
    assert process_use.process_use(1) == ("D", 10.0)
    states[1] = "T"
    assert process_use.process_use(1) == ("T", 10.0)
    states |= {1: "S", 4: "R"}
    assert process_use.process_use(1) == ("S", 10.0)
