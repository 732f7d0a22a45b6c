"""A process with a real state, whose memory is kept, to be killed by a test."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import traceback
from typing import NamedTuple

import torch
from torch import nn

from agent.kept.kept_rank import KeptRank
from worker_hooks.data.feed import Feed
from worker_hooks.kept.state_mapper import StateMapper
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.state.registry import pieces_of
from worker_hooks.tensors import shard


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
        told = self.why_unsafe, self.said.append, os.getppid()
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
            found.update(tensor.numpy().tobytes())
        for content in plan.buffers:
            found.update(content)
        fields = json.loads(plan.head[8:])
        return found.hexdigest(), fields, shard.digest_like("kept-", replica)


class KilledRank(NamedTuple):
    """What is left of it, and what it said."""

    memory: KeptRank
    keeper: int
    told: dict


@contextlib.contextmanager
def killed(act):
    """Have a process call ``act`` and tell what that returns, as JSON, then kill it with SIGKILL.

    ``act`` returns the process's :class:`MappedRank` and what it tells.
    """
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            rank, told = act()
            text = json.dumps([rank.mapper.keeper, rank.mapper.board, told])
        except BaseException:  # noqa: BLE001  the test shows it
            text = json.dumps([0, 0, {"error": traceback.format_exc()}])
        os.write(theirs, text.encode())
        os.close(theirs)
        while True:
            signal.pause()
    os.close(theirs)
    keeper = 0
    try:
        with os.fdopen(ours) as said:
            keeper, board, told = json.loads(said.read())
        assert keeper, told["error"]
        memory = KeptRank(keeper, board)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pid = 0
        try:
            yield KilledRank(memory, keeper, told)
        finally:
            memory.close()
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
