"""A checkpoint in memory, which is as large as the state, is there as long as anybody has it open."""

from __future__ import annotations

import os
from pathlib import Path

from support.one_rank import Training

from agent.dump.draft import DumpDraft, DumpOrder
from agent.dump.memory import MemoryTarget
from worker_hooks.contract import protocol
from worker_hooks.recovery import resume
from worker_hooks.tensors.shard import write_quick


def opened():
    """Files in memory that this process has open."""
    found = []
    for file in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{file}"))
        except OSError:  # the folder itself
            continue
    return [each for each in found if "msrun-memory" in each]


def resuming():
    """It is about to continue from a checkpoint in memory, which msrun has dropped."""
    one = Training()
    for _ in one.state.batches(range(2)):
        one.update()
    continue_from_memory(one)
    assert opened()
    return one


def continue_from_memory(one):
    step, memory = one.state.step, MemoryTarget(one.state.step, 0, 0)
    place = Path(memory.place_of(0))
    done = write_quick(place, one.committed.replica(step), 0, 1, lambda _: None)
    written = protocol.Written(0, 0, 1, "", done.nbytes, "", done.digest)
    order = DumpOrder({0: written}, ((0,),), (), 1, 0, "record", "why")
    path = Path(DumpDraft(memory, step, (0,), {}).commit(order).path)
    one.state._loop.restart()
    env = one.state._guard.env
    one.state._resume_at(resume.restore_replicated(one.committed.pieces, path, env))
    memory.close()


def test_a_loop_over_batches_lets_go_of_it():
    training = resuming()
    for _ in training.state.batches(range(4)):
        assert not opened()
        training.update()
    assert training.state.step > 2


def test_a_loop_of_the_scripts_own_does_with_its_first_step():
    training = resuming()
    for _ in range(2):
        assert not training.state.should_exit
        training.update()
    assert not training.state.should_exit
    assert not opened()
