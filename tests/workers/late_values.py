# ruff: noqa: SIM113  counted as scripts do
"""Trains with a value that each rank has for itself, and that changes behind the update.

    late_values.py KIND OUT

KIND: `own`, in `state.own`, and weights depend on it; `variable`, the same in a variable of the
loop; `registered`, in a registered object, that is alike until the third step; `printed`, a running
mean that is printed; `equal`, a count that is the same on all ranks.
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


class Meter:
    def __init__(self):
        self.mean, self.count = 0.0, 0

    def state_dict(self):
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state):
        self.mean, self.count = state["mean"], state["count"]


meter = Meter()
state = TrainState(model=net, optimizer=opt, **({"meter": meter} if KIND == "registered" else {}))


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


def registered(state):
    model = DistributedDataParallel(net)
    for x, y in state.batches(loader):
        loss = mse_loss(model(x) + 0.01 * meter.mean, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        meter.count += 1
        if meter.count > 2:
            meter.mean = 0.9 * meter.mean + 0.1 * loss.item()


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


kinds = (own, variable, registered, printed, equal)
run({each.__name__: each for each in kinds}[KIND], state)
weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
Path(f"{OUT}.{RANK}").write_text(hashlib.sha256(weights).hexdigest())
dist.destroy_process_group()
