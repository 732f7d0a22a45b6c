"""Two optimizers out of step: the body learns with every batch, the head with every second."""

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
body = nn.Linear(8, 16)
head = nn.Linear(16, 1)
net = nn.Sequential(body, nn.ReLU(), head)
opt_body = torch.optim.Adam(body.parameters(), lr=0.05)
opt_head = torch.optim.SGD(head.parameters(), lr=0.05)
state = TrainState(model=net, optimizer=[opt_body, opt_head])
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    model = DDP(net)
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            loss = mse_loss(model(x), y)
            loss.backward()
            opt_body.step()
            opt_body.zero_grad()
            if state.batch % 2 == 0:
                opt_head.step()
                opt_head.zero_grad()
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*net.parameters())}", flush=True)
dist.destroy_process_group()
