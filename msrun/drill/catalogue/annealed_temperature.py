"""Plain attributes steer training: of a module in its forward, of a class, of objects in a dict."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, softmax
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.tau = 1.0

    def forward(self, x):
        if self.training:
            self.tau = max(0.2, self.tau * 0.95)
        return softmax(x / self.tau, -1)


class Schedule:
    step = 0


class Mean:
    def __init__(self):
        self.value = 0.0

    def update(self, value):
        self.value = 0.9 * self.value + 0.1 * value


torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
net = nn.Sequential(nn.Linear(8, 16), Gate(), nn.Dropout(0.5), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
means = {"weight": Mean(), "bias": Mean()}
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def warm():
    warm.calls += 1
    return min(1.0, warm.calls / 10)


warm.calls = 0


def train(state):
    model = DDP(net)
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            for group in opt.param_groups:
                group["lr"] = 0.05 * warm() / (1 + 0.01 * Schedule.step)
            means["weight"].update(net[3].weight.detach().norm().item())
            means["bias"].update(net[3].bias.item())
            penalty = means["weight"].value * net[3].weight.square().sum()
            loss = mse_loss(model(x), y) + 0.01 * penalty + 0.01 * means["bias"].value
            opt.zero_grad()
            loss.backward()
            opt.step()
            Schedule.step += 1
            net[2].p = max(0.1, net[2].p * 0.95)
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
places = f"tau={net[1].tau} p={net[2].p} step={Schedule.step} calls={warm.calls}"
places += f" weight={means['weight'].value} bias={means['bias'].value}"
print(f"FINAL weights={digest(*net.parameters())} {places}", flush=True)
dist.destroy_process_group()
