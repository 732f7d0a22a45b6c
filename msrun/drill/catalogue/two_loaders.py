"""Two loaders in turn in each epoch, each with a generator of its own, one in its sampler."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest


class Buckets(Sampler):
    def __init__(self, size, batch, seed):
        self.size, self.batch, self.rng = size, batch, random.Random(seed)

    def __iter__(self):
        indices = list(range(self.size))
        self.rng.shuffle(indices)
        return iter([indices[at : at + self.batch] for at in range(0, self.size, self.batch)])

    def __len__(self):
        return self.size // self.batch


torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")
order = torch.Generator().manual_seed(100 + dist.get_rank())
labelled = DataLoader(data, batch_size=4, shuffle=True, generator=order)
unlabelled = DataLoader(data, batch_sampler=Buckets(16, 4, 200 + dist.get_rank()))


def train(state):
    model = DDP(net)
    for epoch in state.epochs(2):
        for loader in (labelled, unlabelled):
            for x, y in state.batches(loader):
                loss = mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*net.parameters())}", flush=True)
dist.destroy_process_group()
