# ruff: noqa: SIM113  counted as scripts do
"""Trains with a value that each rank has for itself, and that changes behind the update.

    late_values.py KIND OUT

KIND: `own`, in `state.own`, and weights depend on it; `variable`, the same in a variable of the
loop; `printed`, a running mean that is printed; `equal`, a count that is the same on all ranks.
Writes a digest of the weights to OUT.RANK.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from worker_hooks import TrainState, run

KIND, OUT = sys.argv[1:3]
RANK = int(os.environ["RANK"])
torch.set_num_threads(1)
torch.manual_seed(5)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
state = TrainState(model=net, optimizer=opt)


def own(state):
    model = DistributedDataParallel(net)
    state.own.setdefault(mean=0.0)
    for x, y in state.batches(loader):
        loss = mse_loss(model(x) + 0.01 * state.own.mean, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        state.own.mean = 0.9 * state.own.mean + 0.1 * loss.item()


def variable(state):
    model = DistributedDataParallel(net)
    mean = 0.0
    for x, y in state.batches(loader):
        loss = mse_loss(model(x) + 0.01 * mean, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = 0.9 * mean + 0.1 * loss.item()


def printed(state):
    model = DistributedDataParallel(net)
    mean = 0.0
    for x, y in state.batches(loader):
        loss = mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = 0.9 * mean + 0.1 * loss.item()
        print(f"mean {mean}", flush=True)


def equal(state):
    model = DistributedDataParallel(net)
    count = 0
    for x, y in state.batches(loader):
        for group in opt.param_groups:
            group["lr"] = 0.1 / (1 + count)
        opt.zero_grad()
        mse_loss(model(x), y).backward()
        opt.step()
        count += 1


run({"own": own, "variable": variable, "printed": printed, "equal": equal}[KIND], state)
weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
Path(f"{OUT}.{RANK}").write_text(hashlib.sha256(weights).hexdigest())
dist.destroy_process_group()
