"""``msrun.launch`` with torch: the ranks meet by gloo, and train beside a parent that has, too."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from msrun import LaunchError, launch

pytestmark = pytest.mark.torch


def train(model, steps):
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        wrapped(torch.full((4, 8), float(dist.get_rank()))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    del wrapped
    dist.destroy_process_group()
    return torch.get_num_threads(), model.weight.detach()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_model_of_the_parent_is_trained_and_its_weights_come_back(start):
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 2)
    model(torch.ones(1, 8)).sum().backward()  # the parent has used torch's threads
    model.zero_grad()
    found = launch(train, [model, 3], nprocs=2, start=start)
    assert [threads for threads, _ in found.values()] == [1, 1]
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], model.weight)


def test_a_killed_rank_is_the_cause_and_peers_that_lost_it_are_not():
    def die():
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    for _ in range(2):  # each has a port of its own
        with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL") as raised:
            launch(die, nprocs=3)
        assert raised.value.rank == 1
        assert all(each.is_consequence for each in raised.value.failures[1:])
