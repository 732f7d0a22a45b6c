"""Target network that the script moves after the step, and a predictor."""

import copy

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
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
predictor = nn.Linear(4, 4)
target = copy.deepcopy(net).requires_grad_(False)
opt = torch.optim.Adam([*net.parameters(), *predictor.parameters()], lr=0.05)
state = TrainState(model={"net": net, "predictor": predictor, "target": target}, optimizer=opt)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    model = DDP(nn.Sequential(net, predictor))
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            view_a, view_b = (x + 0.1 * torch.randn_like(x) for _ in range(2))
            loss = mse_loss(model(view_a), target(view_b))
            opt.zero_grad()
            loss.backward()
            opt.step()
            for p, t in zip(net.parameters(), target.parameters()):
                t.data.lerp_(p.data, 0.1)
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(
    f"FINAL weights={digest(*net.parameters(), *predictor.parameters(), *target.parameters())}",
    flush=True,
)
dist.destroy_process_group()
