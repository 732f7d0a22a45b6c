"""The batch size doubles with the epochs: a new loader for each."""

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
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")


def train(state):
    model = DDP(net)
    batch_size = 4
    for epoch in state.epochs(3):
        loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data))
        for x, y in state.batches(loader):
            loss = mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} batch size {batch_size} loss {loss.item():.4f}")
        batch_size = min(16, batch_size * 2)
    return batch_size


batch_size = run(train, state)
print(f"FINAL weights={digest(*net.parameters())} batch_size={batch_size}", flush=True)
dist.destroy_process_group()
