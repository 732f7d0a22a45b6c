"""Learning rate set by hand from a counter that is a variable of the training function."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def lr_at(it):
    return 0.05 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, it / 16)))


def train(state):
    model = DDP(net)
    iter_num = 0
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            for group in opt.param_groups:
                group["lr"] = lr_at(iter_num)
            loss = mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            iter_num += 1
        print(f"epoch {epoch} loss {loss.item():.4f}")
    return iter_num


iter_num = run(train, state)
print(f"FINAL weights={digest(*net.parameters())} iter_num={iter_num}", flush=True)
dist.destroy_process_group()
