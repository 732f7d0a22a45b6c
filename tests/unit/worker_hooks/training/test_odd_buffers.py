"""Buffers that no page has room for end no training, and are said once."""

from __future__ import annotations

import pytest
import torch

from worker_hooks import TrainState
from worker_hooks.guard.guard import Guard


class Graph(torch.nn.Module):
    """Has a sparse matrix from its first step on, and a memory that grows above 4 MiB."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, 3))
        self.register_buffer("adjacency", None)
        self.register_buffer("memory", torch.zeros(0))

    def forward(self):
        self.adjacency = torch.eye(3).to_sparse()
        self.memory = torch.cat((self.memory, torch.ones(2 << 20)))
        return torch.sparse.mm(self.adjacency, self.weight).sum()


@pytest.mark.parametrize("is_on", [True, False])
def test_no_kind_of_buffer_ends_a_training(monkeypatch, caplog, is_on):
    monkeypatch.setattr(Guard, "is_on", property(lambda _: is_on))
    net = Graph()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = TrainState(model=net, optimizer=optimizer)
    for _ in state.batches(range(4)):
        optimizer.zero_grad()
        net().backward()
        optimizer.step()
    assert state.step == 4
    assert (state._committed.page is not None) == is_on  # without msrun nothing is written
    said = [line.split(":")[0] for line in caplog.messages if line.startswith("buffer ")]
    assert said == is_on * [
        "buffer model.adjacency is no plain tensor any more",
        "buffer model.memory changes its size",
    ]
