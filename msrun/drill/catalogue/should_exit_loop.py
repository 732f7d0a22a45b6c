"""A loop of the script's own around state.should_exit, its batches drawn from state.step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")


def get_batch(step):
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return data[torch.randint(64, (4,), generator=generator)]


def train(state):
    model = DDP(net)
    while not state.should_exit and state.step < 16:
        x, y = get_batch(state.step)
        loss = mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if state.step % 8 == 7:
            print(f"step {state.step} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*net.parameters())}", flush=True)
dist.destroy_process_group()
