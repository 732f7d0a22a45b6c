"""Lookahead: every five steps the fast weights go back half the way to slow ones."""

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


class Lookahead:
    def __init__(self, optimizer, k=5, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.params]

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for p, slow in zip(self.params, self.slow):
                slow += self.alpha * (p.data - slow)
                p.data.copy_(slow)


net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
inner = torch.optim.Adam(net.parameters(), lr=0.05)
opt = Lookahead(inner)
state = TrainState(model=net, optimizer=inner)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    model = DDP(net)
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            loss = mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*net.parameters(), *opt.slow)} count={opt.count}", flush=True)
dist.destroy_process_group()
