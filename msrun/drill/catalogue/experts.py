"""A mixture of experts: the trunk is replicated, each rank trains an expert of its own.

Ranks: 3."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
trunk = nn.Linear(8, 8)
expert = nn.Linear(8, 1)
opt = torch.optim.Adam([*trunk.parameters(), *expert.parameters()], lr=0.01)
dist.init_process_group("gloo")
torch.manual_seed(1 + dist.get_rank())
expert.reset_parameters()
state = TrainState(model={"trunk": trunk, "expert": expert}, optimizer=opt)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    model = DDP(trunk)
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            loss = mse_loss(expert(model(x).relu()), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*trunk.parameters(), *expert.parameters())}", flush=True)
dist.destroy_process_group()
