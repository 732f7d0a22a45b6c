"""Stochastic weight averaging from the second epoch on, with its own schedule."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
averaged = AveragedModel(net)
swa_sched = SWALR(opt, swa_lr=0.02, anneal_epochs=2)
state = TrainState(model=net, optimizer=opt, averaged=averaged, scheduler=swa_sched)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    model = DDP(net)
    for epoch in state.epochs(3):
        for x, y in state.batches(loader):
            loss = mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch >= 1:
            averaged.update_parameters(net)
            swa_sched.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
weights = digest(*net.parameters(), *averaged.parameters())
print(f"FINAL weights={weights} averaged={int(averaged.n_averaged)}", flush=True)
dist.destroy_process_group()
