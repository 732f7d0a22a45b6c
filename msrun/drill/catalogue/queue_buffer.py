"""Contrastive queue in a buffer with a pointer, as in MoCo's code, other keys on each rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.register_buffer("queue", torch.randn(32, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        keys = self.encoder(x)
        logits = keys @ torch.cat([keys, self.queue.clone()]).T
        begin = int(self.pointer)
        self.queue[begin : begin + len(x)] = keys.detach()
        self.pointer[0] = (begin + len(x)) % len(self.queue)
        return logits


net = Contrast()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
state = TrainState(model=net, optimizer=opt)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    model = DDP(net, broadcast_buffers=False)
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            loss = cross_entropy(model(x), torch.arange(len(x)))
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*net.state_dict().values())}", flush=True)
dist.destroy_process_group()
