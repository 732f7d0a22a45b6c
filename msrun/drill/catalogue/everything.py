"""Many of these at once: what `msrun drill --marathon` trains, until a file says the last step.

BatchNorm, Dropout and numpy's noise with a seed of each rank, AdamW, a cosine schedule, an average
of the weights, counters of its own, a shuffled loader, periodic checkpoints.
Ranks: 4.
"""

import argparse
import copy
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from msrun import CheckpointConfig, ModelCheckpoint, TrainState, run
from msrun.drill.digest import digest

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--ckpt", default="checkpoints")
parser.add_argument("--last", type=Path, default=Path("/dev/null"))
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(128, 8), torch.randn(128, 1))
net = nn.Sequential(
    nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
)
opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=40)
ema = copy.deepcopy(net).requires_grad_(False)
policy = CheckpointConfig(save_checkpoint_steps=50, keep_checkpoint_max=2)
saver = ModelCheckpoint("everything", args.ckpt, policy)
state = TrainState(
    model=net,
    optimizer=opt,
    scheduler=sched,
    ema=ema,
    callbacks=[saver],
    ckpt_save_path=args.ckpt,
)
dist.init_process_group("gloo")
torch.manual_seed(100 + dist.get_rank())
np.random.seed(200 + dist.get_rank())
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
samples = 0


def is_over(step):
    """Whether rank 0 has read that this is the last step; all ranks hear the same."""
    said = args.last.read_text() if dist.get_rank() == 0 and args.last.exists() else ""
    told = torch.tensor([int(said or 10**9)])
    dist.broadcast(told, 0)
    return step >= told.item()


def train(state):
    global samples
    model = DDP(net)
    running = 0.0
    for _epoch in state.epochs(args.epochs):
        for x, y in state.batches(loader):
            if is_over(state.step):
                return running
            x = x + torch.from_numpy(np.random.normal(0, 0.1, x.shape)).float()
            loss = mse_loss(model(x), y)
            samples += len(x)
            running = 0.9 * running + 0.1 * loss.item()
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            with torch.no_grad():
                for averaged, p in zip(ema.parameters(), net.parameters()):
                    averaged.mul_(0.9).add_(p, alpha=0.1)
    return running


running = run(train, state)
weights = digest(*net.state_dict().values(), *ema.state_dict().values())
print(f"FINAL weights={weights} samples={samples} running={running}", flush=True)
dist.destroy_process_group()
