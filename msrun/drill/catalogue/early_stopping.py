"""Training stops when the loss was not better for two epochs; the counters are module globals."""

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
held_out = torch.randn(16, 8), torch.randn(16, 1)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
best, bad_epochs = float("inf"), 0
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    global best, bad_epochs
    model = DDP(net)
    for epoch in state.epochs(8):
        for x, y in state.batches(loader):
            loss = mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            value = mse_loss(net(held_out[0]), held_out[1]).item()
        best, bad_epochs = (value, 0) if value < best else (best, bad_epochs + 1)
        if bad_epochs == 2:
            break
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*net.parameters())} best={best} bad_epochs={bad_epochs}", flush=True)
dist.destroy_process_group()
