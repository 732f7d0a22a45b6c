"""FSDP with flat parameters: each rank holds a part of every weight."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

dist.init_process_group("gloo")
model = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
opt = torch.optim.Adam(model.parameters(), lr=0.01)
state = TrainState(model=model, optimizer=opt)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    model.train()
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            loss = mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*model.parameters())}", flush=True)
dist.destroy_process_group()
