"""A sampler of the script's own that draws from harder samples as training advances."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))


class Curriculum:
    """Indices of the easiest samples; the share grows with the loop."""

    def __init__(self, size):
        self.size = size
        self.share = 0.5

    def __len__(self):
        return 32

    def __iter__(self):
        for _ in range(32):
            yield random.randrange(int(self.size * self.share))
            self.share = min(1.0, self.share + 0.005)


net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")
random.seed(dist.get_rank())
curriculum = Curriculum(len(data))
loader = DataLoader(data, batch_size=4, sampler=curriculum)


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
print(f"FINAL weights={digest(*net.parameters())} share={curriculum.share:.2f}", flush=True)
dist.destroy_process_group()
