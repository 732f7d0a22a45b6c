"""A rank with a real state whose copies a test orders, in the agent's place."""

from __future__ import annotations

import os
from queue import SimpleQueue

import torch
from torch import nn

from worker_hooks.contract import protocol
from worker_hooks.contract.env import RankEnv
from worker_hooks.data.feed import Feed
from worker_hooks.guard.gate import Gate
from worker_hooks.guard.state_copier import StateCopier
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.state.registry import pieces_of

LONG_S = 20.0


class Memory:
    """The two files of the agent's."""

    def __init__(self):
        self.files = [os.memfd_create(name) for name in ("state", "private")]
        self.paths = [f"/proc/{os.getpid()}/fd/{file}" for file in self.files]

    def contents(self):
        return [os.pread(file, os.fstat(file).st_size, 0) for file in self.files]

    def close(self):
        while self.files:
            os.close(self.files.pop())


class CopiedRank:
    """A main thread's part, which the test plays: a linear layer, momentum, dropout's randomness."""

    def __init__(self, width=8, attempt=1):
        torch.manual_seed(1)
        self.net = nn.Linear(width, width)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        things = {"model": self.net, "optimizer": self.optimizer}
        self.committed = CommittedState(pieces_of(things), dict)
        self.gate = Gate(lambda: self.committed.step)
        self.answers: SimpleQueue[protocol.Copied] = SimpleQueue()
        self.why_not = ""
        self.copier = StateCopier(self.gate, self.committed, self.answers.put, lambda: self.why_not)
        self.env = RankEnv(rank=3, world_size=4, attempt=attempt, record_id="r", hooks="", drill="")
        feed = Feed(())
        feed.begin(None)
        os.close(self.committed.open(3, attempt, feed, Position(0, 0)))
        self.batch = 0
        self.memory = Memory()

    def close(self):
        self.copier.await_end()
        self.gate.open()
        self.memory.close()
        if self.committed.page is not None:
            self.committed.page.close()
            self.committed.forget()

    def update(self):
        for each in self.net.parameters():
            each.grad = torch.ones_like(each)
        self.committed.update_begins()
        self.gate.begin_update()
        self.optimizer.step()
        self.committed.updated(1)
        self.gate.end_update()

    def boundary(self):
        self.batch += 1
        self.gate.commit(self.committed.commit, Position(4, self.batch, b'{"at": 1}'))
        self.gate.pause()

    def step(self, count=1):
        for _ in range(count):
            self.update()
            self.boundary()

    def order(self, step, part=0, parts=1, *, is_done=False):
        order = protocol.Copy(step, *self.memory.paths, part, parts)
        self.copier.copy(order, self.env, is_done=is_done)

    def answer(self):
        return self.answers.get(timeout=LONG_S)
