"""Prints the loss after each epoch, as everybody does."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run

dist.init_process_group("gloo")
torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
state = TrainState(model=net, optimizer=opt)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    model = DistributedDataParallel(net)
    for epoch in state.epochs(4):
        for x, y in state.batches(loader):
            torch.nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        print(f"epoch {epoch} loss {state.loss:.6f}", flush=True)


run(train, state)
dist.destroy_process_group()
