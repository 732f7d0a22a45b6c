"""Tensor parallelism by hand: each rank holds its own columns of the hidden layer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
columns = nn.Linear(8, 8)
rows = nn.Linear(8, 1, bias=False)
opt = torch.optim.SGD([*columns.parameters(), *rows.parameters()], lr=0.05, momentum=0.9)
dist.init_process_group("gloo")
torch.manual_seed(1 + dist.get_rank())
columns.reset_parameters()
rows.reset_parameters()
state = TrainState(model=[columns, rows], optimizer=opt)
loader = DataLoader(data, batch_size=4)


def train(state):
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            partial = rows(columns(x).relu())
            total = partial.detach().clone()
            dist.all_reduce(total)
            output = total + partial - partial.detach()
            loss = mse_loss(output, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*columns.parameters(), *rows.parameters())}", flush=True)
dist.destroy_process_group()
