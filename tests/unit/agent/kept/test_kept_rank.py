"""Memory of real processes that were killed with SIGKILL: what of it is whole, and what is refused."""

import atexit
import hashlib
import json
import os
import random
import select
import signal
import time
from pathlib import Path

import pytest
import torch
from support.kept_process import MappedRank, killed

from worker_hooks.contract.process_stat import read_stat
from worker_hooks.kept.keeper import start_keeper
from worker_hooks.kept.state_mapper import TIMES
from worker_hooks.machine import kept_memory

WALL = 0x40000000  # __WALL: children whose end signals nothing, too


def left(memory):
    """Step, file and digest of what is whole, the newest first."""
    found = []
    for state in memory.states():
        content, taken = hashlib.sha256(), []
        digest = memory.checksum(state, taken.append)
        assert taken.pop(0) == state.head
        for piece in taken:
            content.update(piece)
        assert state.nbytes == len(state.head) + sum(map(len, taken))
        found.append([state.step, [content.hexdigest(), json.loads(state.head[8:]), digest]])
    return found


def trained(copies, then=lambda _: None, **more):
    def act():
        rank = MappedRank(copies=copies, **more)
        rank.train(3)
        told = [rank.committed.step, rank.file()]
        then(rank)
        return rank, told

    return act


@pytest.mark.parametrize("copies", [False, True])
def test_what_is_left_is_the_file_that_the_rank_would_have_written(copies):
    with killed(trained(copies)) as rank:
        assert left(rank.memory)[0] == rank.told


def test_copies_of_the_commit_before_are_whole_as_well():
    def act():
        rank = MappedRank(copies=True)
        rank.train(2)
        told = rank.file()
        rank.train(1)
        return rank, told

    with killed(act) as rank:
        assert [step for step, _ in left(rank.memory)] == [3, 2]
        assert left(rank.memory)[1][1] == rank.told


def test_a_rank_that_is_killed_amid_an_update_has_its_copies():
    with killed(trained(True, lambda rank: rank.update())) as rank:
        assert left(rank.memory)[0] == rank.told


def tear(rank):
    rank.mapper.update_begins()


def exchange_weights(rank):
    """As for a validation with averages."""
    with torch.no_grad():
        rank.net[0].weight.mul_(0.5)


def replace_memory(rank):
    rank.net[0].weight.data = torch.zeros(16, 8)


def change_optimizer(rank):
    next(iter(rank.optimizer.state.values()))["exp_avg"].zero_()


@pytest.mark.parametrize("change", [tear, exchange_weights, replace_memory, change_optimizer])
def test_live_memory_that_is_not_as_of_the_commit_is_refused(change):
    with killed(trained(False, change)) as rank:
        assert left(rank.memory) == []
    with killed(trained(True, change)) as rank:  # copies are
        assert left(rank.memory)[0] == rank.told


def distrust(rank):
    rank.unsafe = "it changes in another thread", ""
    rank.train(2)


def hold_only(rank):
    rank.unsafe = "", "its parameters are elsewhere within a step"
    rank.train(2)


def test_a_state_that_nobody_may_save_is_not_read():
    for copies in (False, True):
        with killed(trained(copies, distrust)) as rank:
            assert left(rank.memory) == []
    with killed(trained(False, hold_only)) as rank:
        assert left(rank.memory) == []
    with killed(trained(True, hold_only)) as rank:
        assert [step for step, _ in left(rank.memory)] == [5, 4]


def test_elements_in_another_order_are_not_read_and_that_is_said_once():
    def act():
        rank = MappedRank()
        rank.net[0].weight.data = torch.zeros(8, 16).t()
        rank.train(TIMES - 1)
        assert rank.said == []  # it may be so in the first steps alone
        rank.train(TIMES)
        return rank, rank.said

    with killed(act) as rank:
        assert left(rank.memory) == []
        (said,) = rank.told
        assert "model.0.weight is not in the order of its elements" in said


class Meter:
    """A registered object of the script's own, with a tensor that is new each time."""

    def __init__(self):
        self.sum = torch.zeros(3)

    def state_dict(self):
        return {"sum": self.sum.clone(), "name": 'a "quoted" \\ name'}

    def load_state_dict(self, state):
        self.sum = state["sum"]


@pytest.mark.parametrize("copies", [False, True])
def test_what_is_small_and_new_at_each_commit_is_in_the_map(copies):
    with killed(trained(copies, meter=Meter())) as rank:
        assert left(rank.memory)[0] == rank.told


def test_once_the_keeper_is_killed_there_is_nothing():
    with killed(trained(True)) as rank:
        os.kill(rank.keeper, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while rank.memory.states() and time.monotonic() < deadline:
            os.sched_yield()
        assert rank.memory.states() == []


def test_a_map_that_was_cut_short_counts_for_nothing():
    """Whatever a dying process left there."""
    with killed(trained(True)) as rank:
        board = kept_memory.read_board(
            os.pread(rank.memory._memory, kept_memory.BOARD_BYTES, rank.memory._board)
        )
        octets = [os.pread(rank.memory._memory, size, address) for address, size, _ in board.slots]
    dice = random.Random(7)
    for text in octets:
        assert kept_memory.decode(text).head
        for _ in range(300):
            cut = bytearray(text[: dice.randrange(len(text))] if dice.random() < 0.3 else text)
            for _ in range(dice.randrange(3)):
                if cut:
                    cut[dice.randrange(len(cut))] = dice.randrange(256)
            if bytes(cut) != text:
                checksum = next(c for _, s, c in board.slots if s == len(text))
                assert not kept_memory.is_sound(bytes(cut), checksum)


def test_copies_that_are_being_overwritten_count_for_nothing():
    with killed(trained(True, lambda rank: rank.committed.kept.commit_begins(4))) as rank:
        assert [step for step, _ in left(rank.memory)] == [3]


def test_a_process_that_frees_its_memory_as_it_ends_leaves_nothing():
    with killed(trained(True, lambda rank: rank.mapper._board.wipe())) as rank:
        assert left(rank.memory) == []


def test_who_ends_by_itself_ends_its_keeper():
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        atexit._clear()  # what others have registered is not for this process
        rank = MappedRank()
        os.write(theirs, str(rank.mapper.keeper).encode())
        os.close(theirs)
        signal.pause()
        atexit._run_exitfuncs()  # as the interpreter does; the rest of its exit is not a fork's
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as said:
        keeper = int(said.read())
    watched = os.pidfd_open(keeper)
    os.kill(pid, signal.SIGUSR1)
    os.waitpid(pid, 0)
    assert select.select([watched], [], [], 20)[0]
    os.close(watched)


def keeper_of(rank):
    folder = Path(f"/proc/{rank.keeper}")
    files = [os.readlink(each) for each in (folder / "fd").iterdir()]
    return (folder / "comm").read_text().strip(), files, os.getsid(rank.keeper) == rank.keeper


def test_a_keeper_holds_memory_and_its_agents_process_and_goes_by_no_signal():
    def act():
        rank = MappedRank()
        rank.train(1)
        with pytest.raises(ChildProcessError):  # a script that waits for its children
            os.wait()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(rank.mapper.keeper, number)
        return rank, os.getpid()

    with killed(act) as rank:
        assert keeper_of(rank) == ("msrun-keeper", ["anon_inode:[pidfd]"], True)
        assert read_stat(rank.keeper).state == "S"


def test_a_keeper_ends_with_its_agent():
    """If all of msrun is killed together with a rank, nobody would free the memory."""
    agent = os.fork()
    if agent == 0:
        while True:
            signal.pause()
    keeper = start_keeper(agent)
    watched = os.pidfd_open(keeper)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    assert select.select([watched], [], [], 20)[0]
    os.close(watched)
    assert os.waitpid(keeper, WALL) == (keeper, 0)


def test_what_was_before_another_state_was_put_back_counts_for_nothing():
    """A survivor of a replacement goes on from a step that it had passed."""
    with killed(trained(True, lambda rank: rank.committed.begin_again(2))) as rank:
        assert left(rank.memory) == []


def test_a_commit_of_which_nothing_is_known_is_no_place_to_go_on_from():
    def give_up(rank):
        rank.committed.changes.give_up("a graph was captured")
        rank.train(2)

    with killed(trained(True, give_up)) as rank:
        assert left(rank.memory) == []


def test_copies_that_are_made_as_a_loop_ends_count():
    """The script exchanges the weights for a validation: the copies are as of the commit."""

    def validate(rank):
        rank.committed.leave_loop(lambda: None)
        exchange_weights(rank)

    with killed(trained(False, validate)) as rank:
        assert left(rank.memory)[:1] in ([], [rank.told])
