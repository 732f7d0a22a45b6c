"""One rank that trains under TrainState, without an agent."""

from __future__ import annotations

import torch
from torch import nn

from worker_hooks import TrainState


class Training:
    """A linear layer, momentum, a schedule."""

    def __init__(self, **objects):
        torch.manual_seed(1)
        self.net = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        mine = {"model": self.net, "optimizer": self.optimizer, "scheduler": self.schedule}
        self.state = TrainState(**mine | objects)
        self.committed = self.state._committed

    def backward(self):
        self.net(torch.ones(1, 3)).square().sum().backward()

    def update(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def record(self):
        return self.committed.page.record(self.state.step)
