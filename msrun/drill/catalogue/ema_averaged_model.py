"""EMA of the weights by torch.optim.swa_utils.AveragedModel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import TrainState, run
from msrun.drill.digest import digest

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
state = TrainState(model=net, optimizer=opt, ema=ema)
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
            ema.update_parameters(net)
        print(f"epoch {epoch} loss {loss.item():.4f}")


run(train, state)
print(
    f"FINAL weights={digest(*net.parameters(), *ema.parameters())} averaged={int(ema.n_averaged)}",
    flush=True,
)
dist.destroy_process_group()
