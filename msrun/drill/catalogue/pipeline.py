"""A pipeline by hand: rank 0 holds the first stage, rank 1 the second."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))


dist.init_process_group("gloo")
is_first = dist.get_rank() == 0
net = nn.Linear(8, 16) if is_first else nn.Linear(16, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
state = TrainState(model=net, optimizer=opt)
loader = DataLoader(data, batch_size=4)


def train(state):
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            opt.zero_grad()
            if is_first:
                hidden = net(x).relu()
                dist.send(hidden.detach(), 1)
                gradient = torch.empty_like(hidden)
                dist.recv(gradient, 1)
                hidden.backward(gradient)
            else:
                hidden = torch.empty(len(x), 16, requires_grad=True)
                dist.recv(hidden.data, 0)
                loss = mse_loss(net(hidden), y)
                loss.backward()
                dist.send(hidden.grad, 0)
            opt.step()
        print(f"epoch {epoch} is done")


run(train, state)
print(f"FINAL weights={digest(*net.parameters())}", flush=True)
dist.destroy_process_group()
