"""A centre of outputs, a registered buffer that the loss moves in every step."""

import copy

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


class DinoLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 4))

    def forward(self, student, teacher):
        loss = cross_entropy(student, (teacher - self.center).softmax(1))
        batch = teacher.mean(0, keepdim=True)
        dist.all_reduce(batch)
        self.center = self.center * 0.9 + batch / dist.get_world_size() * 0.1
        return loss


net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
teacher = copy.deepcopy(net).requires_grad_(False)
criterion = DinoLoss()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
state = TrainState(model=net, teacher=teacher, criterion=criterion, optimizer=opt)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    model = DDP(net)
    for epoch in state.epochs(2):
        for x, y in state.batches(loader):
            with torch.no_grad():
                wanted = teacher(x)
            loss = criterion(model(x + 0.1 * torch.randn_like(x)), wanted)
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                for p, t in zip(net.parameters(), teacher.parameters()):
                    t.mul_(0.9).add_(0.1 * p)
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(
    f"FINAL weights={digest(*net.parameters(), *teacher.parameters(), criterion.center)}",
    flush=True,
)
dist.destroy_process_group()
