"""The next batch is drawn at the end of a step, as nanoGPT does, in a loop of the script's own."""

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
torch.manual_seed(100 + dist.get_rank())


def get_batch():
    index = torch.randint(64, (4,))
    return data[index]


def train(state):
    model = DDP(net)
    x, y = get_batch()
    while not state.should_exit and state.step < 16:
        loss = mse_loss(model(x), y)
        x, y = get_batch()
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
    print(f"loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*net.parameters())}", flush=True)
dist.destroy_process_group()
