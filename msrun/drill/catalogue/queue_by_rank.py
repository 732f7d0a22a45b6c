"""Contrastive queue in a registered tensor, other keys on each rank.

Ranks: 3."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
queue = torch.randn(32, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
state = TrainState(model=net, optimizer=opt, queue=queue)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    model = DDP(net)
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            keys = model(x + 0.1 * torch.randn_like(x))
            loss = cross_entropy(keys @ torch.cat([keys, queue]).T, torch.arange(len(x)))
            opt.zero_grad()
            loss.backward()
            opt.step()
            queue[:] = torch.cat([keys.detach(), queue])[: len(queue)]
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*net.parameters(), queue)}", flush=True)
dist.destroy_process_group()
