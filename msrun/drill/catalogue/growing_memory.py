"""A memory that grows in a buffer, a buffer that is added, and a list that one batch alone sets."""

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


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("memory", torch.zeros(0, 8))

    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(8))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.memory = torch.cat([self.memory, x[:2]])[-24:]
        return self.inner(x - self.mean) + 0.1 * self.memory.mean(0)


class Engine:
    def __init__(self, model):
        self.model = model

    def epoch(self, state, epoch):
        for number, (x, y) in enumerate(state.batches(loader)):
            if number == 1:
                shift = [x.mean().item()]
            loss = mse_loss(self.model(x), y)
            if number > 0:
                loss = loss * (1 + shift[0])
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


net = nn.Sequential(Bank(), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    engines = {"only": Engine(DDP(net, broadcast_buffers=False))}
    for epoch in state.epochs(2):
        engines["only"].epoch(state, epoch)


run(train, state)
print(f"FINAL weights={digest(*net.state_dict().values())}", flush=True)
dist.destroy_process_group()
