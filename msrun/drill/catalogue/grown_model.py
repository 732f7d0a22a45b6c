"""The model gets another block in the second epoch."""

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
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
head = nn.Linear(8, 1)
opt = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=0.01)
state = TrainState(model=[net, head], optimizer=opt)
dist.init_process_group("gloo")
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def train(state):
    for epoch in state.epochs(2):
        if epoch == 1:
            torch.manual_seed(epoch)
            net.append(nn.Linear(8, 8))
            opt.add_param_group({"params": net[-1].parameters()})
        model = DDP(nn.Sequential(net, head))
        for x, y in state.batches(loader):
            loss = mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(f"FINAL weights={digest(*net.parameters(), *head.parameters())}", flush=True)
dist.destroy_process_group()
