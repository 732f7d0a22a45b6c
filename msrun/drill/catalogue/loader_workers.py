"""Two loader processes that augment the data with all three random modules."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)


class Augmented(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.full((8,), index / 64.0) + 0.1 * torch.randn(8)
        return x * random.uniform(0.9, 1.1), torch.tensor(
            [np.sin(index) + np.random.rand()]
        ).float()


data = Augmented()


net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=2)


def train(state):
    model = DDP(net)
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            loss = mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*net.parameters())}", flush=True)
dist.destroy_process_group()
