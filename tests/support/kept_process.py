"""A process with a real state, whose memory is kept, to be killed by a test."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import hashlib
import json
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from agent.kept.kept_rank import KeptRank
from worker_hooks.contract.status_page import Page
from worker_hooks.data.feed import Feed
from worker_hooks.kept.state_mapper import TIMES, StateMapper
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.state.registry import pieces_of
from worker_hooks.tensors import shard

ROOT = Path(__file__).parents[2]
LONG_S = 60.0
SPECIAL = {"meter", "end", "limit", "crash"}
LIBC = ctypes.CDLL(None)


class MappedRank:
    """In the process: a network with buffers, an optimizer with state, a schedule."""

    def __init__(self, *, copies=False, **more):
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        things = {"model": self.net, "optimizer": self.optimizer, "schedule": self.schedule, **more}
        self.committed = CommittedState(pieces_of(things), dict)
        self.said: list[str] = []
        self.costs: list[tuple[float, float]] = []
        told = (
            self.why_unsafe,
            self.said.append,
            (os.getppid(),),
            lambda *cost: self.costs.append(cost),
        )
        self.mapper = self.committed.kept = StateMapper(self.committed.pieces, *told)
        if copies:
            self.committed.changes.keep_all()
        self.unsafe = "", ""
        feed = Feed(())
        feed.begin(None)
        os.close(self.committed.open(0, 0, feed, Position(0, 0)))
        self.committed.changes.begin(0)

    def why_unsafe(self):
        return self.unsafe

    def update(self):
        self.net(torch.randn(6, 8)).square().sum().backward()
        self.committed.under_way(Position(0, self.committed.step + 1))
        self.committed.update_begins()
        self.mapper.update_begins()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.committed.updated(1)
        self.schedule.step()

    def train(self, steps=3):
        for _ in range(steps):
            self.update()
            self.committed.commit(Position(0, self.committed.step + 1))

    def file(self):
        """What a dump of the newest commit would write: the sha256, and the state's digest."""
        replica = self.committed.replica(self.committed.step)
        plan, found = shard.plan(replica, 0, 1), hashlib.sha256()
        for tensor, _ in plan.segments:
            found.update(tensor.clone().numpy().tobytes())  # numpy's memory could not grow any more
        for content in plan.buffers:
            found.update(content)
        fields = json.loads(plan.head[8:])
        return found.hexdigest(), fields, shard.digest_like("kept-", replica)


class Meter:
    """A registered object of the script's own, with a tensor that is new each time."""

    def __init__(self):
        self.sum = torch.zeros(3)

    def state_dict(self):
        return {"sum": self.sum.clone(), "name": 'a "quoted" \\ name'}

    def load_state_dict(self, state):
        self.sum = state["sum"]


def nothing(rank):
    """It is killed behind its commit."""


def update(rank):
    rank.update()


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


def train_on(rank):
    """What it tells is of the commit before."""
    rank.train(1)


def distrust(rank):
    rank.unsafe = "it changes in another thread", ""
    rank.train(2)


def hold_only(rank):
    rank.unsafe = "", "its parameters are elsewhere within a step"
    rank.train(2)


def give_up(rank):
    rank.committed.changes.give_up("a graph was captured")
    rank.train(2)


def turn_weights(rank):
    rank.net[0].weight.data = torch.zeros(8, 16).t()
    rank.train(TIMES - 1)
    assert rank.said == []  # it may be so in the first steps alone
    rank.train(TIMES)
    return rank.said


def overwrite(rank):
    rank.mapper.commit_begins(rank.committed.step + 1)


def free(rank):
    rank.mapper._board.wipe()


def go_back(rank):
    """As a survivor of a replacement, which goes on from a step that it had passed."""
    rank.committed.begin_again(2)


def free_weights(rank):
    """They go back to the allocator, who hands them out again."""
    rank.net[0].weight.data = torch.zeros(0)
    gc.collect()
    LIBC.malloc_trim(0)
    rank.garbage = [torch.full((16, 8), float(number)) for number in range(64)]


def grow(rank):
    """A weight's storage, which moves by that; nothing else of it changes."""
    storage = rank.net[0].weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(size + (8 << 20))
    storage.resize_(size)
    rank.garbage = [torch.full((16, 8), float(number)) for number in range(64)]


def grow_and_train(rank):
    grow(rank)
    rank.train(1)
    return rank.committed.step, rank.file()


def drop_moments(rank):
    """As to begin with an optimizer anew; what was committed had them."""
    rank.optimizer.state.clear()
    gc.collect()
    rank.garbage = [torch.full((16, 8), float(number)) for number in range(64)]


def add_parameter(rank):
    """Nothing of it is in the commit."""
    late = nn.Parameter(torch.ones(50))
    rank.net.register_parameter("late", late)
    rank.optimizer.add_param_group({"params": [late]})


def train_more(rank):
    """A parameter is added, and the next steps have it."""
    add_parameter(rank)
    rank.train(2)
    found = rank.committed.step, rank.file()
    assert "model.late" in found[1][1]
    return found


def fork_and_write(rank):
    """A child writes over all that it has, frees it and ends as a script does."""
    if child := os.fork():
        assert os.waitpid(child, 0) == (child, 0)
        return
    code = 1
    try:
        for parameter in rank.net.parameters():
            parameter.data.fill_(float("nan"))
        rank.train(2)
        free_weights(rank)
        atexit._run_exitfuncs()
        code = 0
    finally:
        os._exit(code)


def load_in_processes(rank):
    """Workers of a loader live on when the rank is killed."""
    rank.loader = iter(DataLoader(TensorDataset(torch.arange(64.0)), num_workers=2))
    next(rank.loader)


def use_large_pages(rank):
    """Weights in huge pages that are locked in memory."""
    size = 4 << 20
    room = rank.room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    elements = torch.frombuffer(room, dtype=torch.float32)
    LIBC.mlock(ctypes.c_void_p(elements.data_ptr()), ctypes.c_size_t(size))
    weight = rank.net[0].weight
    weight.data = elements[: weight.numel()].view_as(weight).copy_(weight.data)
    rank.train(1)
    return rank.committed.step, rank.file()


def share_weights(rank):
    """They move to memory that other processes may share."""
    rank.net.share_memory()
    rank.train(1)
    return rank.committed.step, rank.file()


def measure(rank):
    """What notes cost is told behind the first steps."""
    rank.train(20)
    return rank.costs


def note_no_more(rank):
    """As msrun has ordered; the keeper is gone, and nothing of it is left to wait for."""
    rank.train(2)
    rank.mapper.is_over = True
    rank.train(2)
    assert rank.committed.kept is None
    with contextlib.suppress(ChildProcessError):
        os.waitpid(rank.mapper.keeper, 0x40000000)
        return "a child is left"
    return "nothing is left"


def use_accelerator(rank):
    """As a part of the state that is moved there after training began in host memory."""
    rank.committed.device = object()
    rank.mapper.note(rank.committed, rank.committed._commit, rank.committed.private.read(3))


def validate(rank):
    rank.committed.leave_loop(lambda: None)
    exchange_weights(rank)


def commit_by_lines(rank):
    """At each line of a commit: the newest step that the page has, and those that are whole.

    As the agent would find them if the process were killed there.
    """
    memory, found = KeptRank(os.getpid(), rank.mapper.board), set()

    def look(*_):
        steps = [state.step for state in memory.states()]
        content = rank.committed.page.content()
        copy = mmap.mmap(-1, len(content))
        copy[:] = content
        page = Page(copy)
        for step in steps:
            page.complete(step)
        found.add((page.newest_step(), *steps))
        return look

    rank.update()
    sys.settrace(look)
    rank.committed.commit(Position(0, rank.committed.step + 1))
    rank.committed.leave_loop(lambda: None)
    sys.settrace(None)
    return sorted(found)


def wait_for_children(_):
    try:
        os.wait()
    except ChildProcessError:
        return "there are none"
    return "it has some"


def perform(name: str, copies: str) -> None:
    """In the process: train, change something, tell it, and wait for the end; or end by itself."""
    torch.set_num_threads(1)
    if name == "limit":
        with open("/proc/self/statm") as file:
            most = (int(file.read().split()[0]) * mmap.PAGESIZE) + (32 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    rank = MappedRank(copies=copies == "True", **({"meter": Meter()} if name == "meter" else {}))
    rank.train(3)
    told = [rank.committed.step, rank.file()]
    told = globals()["nothing" if name in SPECIAL else name](rank) or told
    print(json.dumps([os.getpid(), rank.mapper.keeper, rank.mapper.board, told]), flush=True)
    if name not in {"end", "crash"}:
        signal.pause()
    sys.stdin.readline()
    if name == "crash":
        most = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (most, most))
        os.kill(os.getpid(), signal.SIGSEGV)


class KilledRank(NamedTuple):
    """What is left of it, and what it told."""

    memory: KeptRank
    keeper: int
    told: Any


@contextlib.contextmanager
def process(python, name, *, copies=False, folder=None):
    """A process that performs this, and what it said."""
    code = f"from support.kept_process import perform; perform({name!r}, {str(copies)!r})"
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    with subprocess.Popen(
        [*python.words, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
    ) as running:
        try:
            assert running.stdout is not None
            yield running, json.loads(running.stdout.readline())
        finally:
            running.kill()


@contextlib.contextmanager
def killed(python, name, *, copies=False):
    """What such a process leaves when it is killed with SIGKILL."""
    with process(python, name, copies=copies) as (_, (pid, keeper, board, told)):
        memory, watched = KeptRank(keeper, board), os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([watched], [], [], LONG_S)[0]
        os.close(watched)
        try:
            yield KilledRank(memory, keeper, told)
        finally:
            memory.close()
