"""Weights of which this rank has a part: an update counts its own parts, and autograd goes on with the others."""

from __future__ import annotations

import pytest
import torch
from support.meshes import mesh_seen_by
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from worker_hooks import TrainState
from worker_hooks.distributed import process_group


class Layer(nn.Module):
    """Backward needs its part of the weight as it was."""

    def __init__(self, mesh):
        super().__init__()
        whole = DTensor.from_local(torch.eye(3), mesh, [Shard(0)], run_check=False)
        self.weight = nn.Parameter(whole)

    def forward(self, x):
        return (x @ self.weight.to_local()).tanh()


def test_each_weight_may_have_an_optimizer_that_updates_it_within_backward():
    with mesh_seen_by(0, size=1) as mesh:
        net = nn.Sequential(*[Layer(mesh) for _ in range(3)])
        optimizers = {each: torch.optim.SGD([each], 0.1, foreach=True) for each in net.parameters()}
        hooks = [
            each.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
            for each in optimizers
        ]
        state = TrainState(model=net, optimizer=list(optimizers.values()))
        for batch in state.batches(torch.ones(4, 3)):
            before = [part._version for part in state._committed._reader._cut._parts[:3]]
            net(batch).sum().backward()
            after = [part._version for part in state._committed._reader._cut._parts[:3]]
            assert all(new > old for new, old in zip(after, before, strict=True))
            for each in net.parameters():
                each.grad = None
        assert state.step == 4
        for each in hooks:
            each.remove()


@pytest.mark.parametrize("where", ["update", "backward", "closure"])
def test_an_optimizer_that_communicates_is_named(monkeypatch, where):
    begun = [0]
    monkeypatch.setattr(process_group, "collectives", lambda: begun[0])

    class Muon(torch.optim.SGD):
        def step(self, closure=None):
            begun[0] += where == "update"
            return super().step(closure)

    net = nn.Linear(2, 2)
    optimizer = Muon(net.parameters(), 0.1)
    state = TrainState(model=net, optimizer=optimizer)

    def closure():
        net(torch.ones(1, 2)).sum().backward()
        begun[0] += where != "update"

    for _ in state.batches(range(4)):
        optimizer.zero_grad()
        if where == "closure":  # in the first step the update has begun by then
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert state._committed.changes._keeps_all == (where == "update")
