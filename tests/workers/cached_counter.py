"""A script whose learning rate hangs on a counter where nobody looks: it cannot resume correctly."""

import argparse
import hashlib
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run

argparse.ArgumentParser().parse_known_args()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


@cache
def calls() -> list[int]:
    """What a function has cached: a new process begins with an empty one."""
    return []


def train(state):
    model = DistributedDataParallel(net)
    for _epoch in state.epochs(2):
        for x, y in state.batches(loader):
            counter = calls()
            counter.append(len(counter))
            opt.param_groups[0]["lr"] = 0.1 / len(counter)
            opt.zero_grad()
            mse_loss(model(x), y).backward()
            opt.step()


run(train, state)
weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
print(f"FINAL weights={hashlib.sha256(weights).hexdigest()[:12]}", flush=True)
dist.destroy_process_group()
